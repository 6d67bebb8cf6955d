"""The requested level: what the config requests in each step, by the rules of ``commprof.requested``.

No collective is read for it. The buckets that the runtime published only show the order in which gradients arrived,
which decides how they are split, not how many bytes they are.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa

from commprof.errors import CommprofError
from commprof.ledger.records.issued import StepKey
from commprof.ledger.records.row_index import combinations
from commprof.ledger.requests.engine_metrics import COLUMNS as OF_METRICS
from commprof.ledger.requests.engine_metrics import NO_METRICS, EngineMetrics, engine_metrics_of
from commprof.ledger.requests.expert_tokens import OF_TYPES, ExpertTokens, expert_tokens_of
from commprof.ledger.requests.gradient_orders import gradient_orders
from commprof.ledger.requests.module_orders import Pass
from commprof.ledger.requests.shared_models import USUAL, SharedModel, shared_model_of
from commprof.ledger.requests.wrapped_models import WrappedModels, reading_wrappers, wrapped_models_of
from commprof.requested.auto_values import filled
from commprof.requested.configuration import Configuration, autocast_dtype, read_configuration
from commprof.requested.errors import UnsupportedError
from commprof.requested.expectation import Expectation
from commprof.requested.experts.layers import token_bytes
from commprof.requested.experts.rank_groups import RankGroups
from commprof.requested.parallel import axis_rules
from commprof.requested.parallel.axes import DATA, SEQUENCE
from commprof.requested.parameters import of_one_rank
from commprof.requested.zero import zero_stages
from commprof.requested.zero.gathering import ReleasedBy
from commprof.requested.zero.stage3 import Construction
from commprof.requested.zero.zero_stages import STEADY
from commprof.schema import Purpose

NO_CONFIG: Final = "no config was recorded"
NOT_ZERO: Final = "the config is not one of DeepSpeed's: it has neither zero_optimization nor a batch size"
NO_PARAMETERS: Final = "the run published no parameters, so nothing can be computed from their sizes"
SHARED_STEPS: Final = (
    "the program trains several engines whose steps have the same numbers, as those of a GAN have, and nothing tells which "
    "engine issued what"
)
# Without zero_optimization such a config is stage 0.
_OF_EXPERTS: Final = ".deepspeed_experts."  # in the names of their parameters
HOST: Final = "host"  # what zero_runtime calls a group of the ranks of one host
AXIS: Final = re.compile(r"axis \d+ of (?P<sizes>\d+(x\d+)*)")  # and one of those along an axis of a grid
MOST_PARAMETERS: Final = 10_000_000  # more of one size is a damaged number
_DEEPSPEED_KEYS: Final = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
# Resolved by the engine in its effective config, or without influence on what is sent.
_RESOLVED: Final = (
    "gradient_reduction",
    "reduce_scatter_impl",
    "train_batch_size",
    "micro_batch_size",
)


class RecordedRun(Protocol):
    """What the ledger needs of a run; ``commprof.trace.reader.Run`` has it."""

    @property
    def path(self) -> Any:
        """The run directory."""

    @property
    def manifest(self) -> Any:
        """``commprof.trace.manifest.Manifest``."""

    @property
    def health(self) -> Any:
        """``commprof.trace.health.Health``."""

    def table(self, name: str) -> pa.Table:
        """A table of the schema."""

    def parts(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Columns of a table of the schema, some rows at a time."""


class WholeRun(RecordedRun, Protocol):
    """A run with all of its steps."""

    def without_records(self) -> RecordedRun:
        """The same run with no row of ``collectives``."""


def last_attempt(run: RecordedRun) -> int:
    """The number of the last attempt: those before it were stopped, whatever became of this one."""
    return max((entry["attempt"] for entry in run.manifest.ranks), default=0)


def recorded_ranks(run: RecordedRun) -> Mapping[int, Set[int]]:
    """The ranks of each attempt that have records; an attempt without any has none."""
    ranks: dict[int, set[int]] = defaultdict(set)
    for entry in run.manifest.ranks:
        if entry["records"]:
            ranks[entry["attempt"]].add(entry["rank"])
    return ranks


class Released(NamedTuple):
    """How much of the persistent parameters a step finds released, from 0 to 1, and why."""

    share: float = 0.0
    by: ReleasedBy = ""


NOTHING_RELEASED: Final = Released()


class _Asked(NamedTuple):
    """Arguments of ``zero.expected``, and the factor of activations compared with a usual step."""

    order: tuple[str, ...] | None
    iteration: int | None
    zero_init: bool | Construction
    scale: Fraction = USUAL
    released_by: ReleasedBy = ""


@dataclass
class Request:
    """What a run requested, or ``reason``: why that is not known.

    Attributes:
        config: the config that the rules read, and ``source``: where it comes from.
        differences: keys in which the engine's own config is another than the file.
        shared: how the ranks share the model; None where each has all of it.
        host_ranks: ranks of each host, as the launcher reports them; None where that is not known.
        grid: the axes along which the groups of the run go, outermost first; a single one where there are no such groups.
        wrapped: the models that wrappers of torch train, where there is no engine; ``config`` is empty then.
        metrics: what the engine says of its steps that no message shows.
        costs: the costs that the run used to send messages along the axes; None where it published none.
        construction: how the parameters were made, as the engine says; None where it does not.
        experts: the layers of experts and their tokens; None where there are none.
    """

    reason: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    configuration: Configuration | None = None
    source: str = ""
    differences: tuple[str, ...] = ()
    parameters: Sequence[zero_stages.Parameter] = ()
    world_size: int = 1
    backend: str = "gloo"
    runtime: zero_stages.Runtime = "zero_runtime"
    micro_steps: int = 1
    orders: Mapping[StepKey, Sequence[tuple[str, ...]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    shared: SharedModel | None = None
    wrapped: WrappedModels | None = None
    experts: ExpertTokens | None = None
    host_ranks: int | None = None
    grid: tuple[int, ...] | None = None
    costs: object = None
    metrics: EngineMetrics = NO_METRICS
    _kinds: dict[str, int] = field(default_factory=dict)  # of steps, and the first of each
    construction: Construction | None = None
    _rows: dict[_Asked, list[Expectation]] = field(default_factory=dict)
    _estimates: dict[tuple[object, ...], list[Expectation]] = field(default_factory=dict)

    def expectations(
        self,
        key: StepKey,
        ordinal: int = 0,
        *,
        zero_init: bool = False,
        passes: Sequence[Pass] | None = None,
        released: Released = NOTHING_RELEASED,
    ) -> list[Expectation]:
        """What step ``key`` should send; the time before the first step is step -1.

        Args:
            ordinal: number of the step since this attempt began: stage 3 sends more in its first two micro-batches.
            zero_init: the model was made within ``zero.Init``, which broadcasts it once less at stage 3. Where the engine
                says how each parameter was made, that counts.
            passes: what each micro-batch does about the order of modules, where an evaluation has changed that.
            released: what of the persistent parameters is released when the step begins.

        Raises:
            CommprofError: the rules do not cover the config.
        """
        if self.wrapped is not None:
            return self.wrapped.expected(key)
        if key.step < 0:
            construction = self.construction or zero_init
            return [row for row in self._expected(_Asked(None, None, construction)) if row.when == "init"]
        orders: Sequence[tuple[str, ...] | None] = self.orders.get(key) or [None]
        of_kind = self._kind(key)
        scale = USUAL if self.shared is None else self.shared.scale(key)
        expected = [
            row for row in self._expected(_Asked(orders[0], of_kind, False, scale)) if row.when == "step"
        ]
        expected += [] if self.shared is None else self.shared.once(key, ordinal)
        expected += [] if self.experts is None else self.experts.expected(key, self.micro_steps)
        for micro in range(self.micro_steps):
            order = orders[min(micro, len(orders) - 1)]
            number = ordinal * self.micro_steps + micro
            of_start = NOTHING_RELEASED if micro else released
            if of_kind is None and passes is not None:
                expected += self._of_pass(passes[micro], order, number, of_start)
                continue
            iteration = self._alike(number) if of_kind is None else of_kind
            expected += self._of_micro_batch(order, iteration, of_start)
        if self.skips(key):
            expected = zero_stages.up_to_overflow(expected, self.config, self._counted(key))
        return expected

    def micro_batch_checks(self) -> int:
        """Broadcasts of ``trace_check`` of a micro-batch that compares no order of modules."""
        rows = self._of_micro_batch(None, STEADY)
        return sum(row.count for row in rows if row.purpose == Purpose.TRACE_CHECK)

    def _of_micro_batch(
        self, order: tuple[str, ...] | None, iteration: int, released: Released = NOTHING_RELEASED
    ) -> list[Expectation]:
        if 0 < released.share < 1:
            return self._partly_released(order, iteration, released)
        rows = self._expected(_Asked(order, iteration, False, released_by=released.by))
        trained = self._without_frozen
        least = 0 if trained is None else _gather_bytes(trained._of_micro_batch(order, iteration, released))
        return [
            row if trained is None else _as_far_as_frozen_modules_run(row, least)
            for row in rows
            if row.when == "micro_step"
        ]

    def _partly_released(
        self, order: tuple[str, ...] | None, iteration: int, released: Released
    ) -> list[Expectation]:
        """What a micro-batch sends that finds a part of the persistent parameters ``released``: which, nothing tells."""
        key = order, iteration, released
        if key not in self._estimates:
            usual = {
                (row.issued_op, row.group_size, row.groups): row.payload_bytes
                for row in self._of_micro_batch(order, iteration)
                if row.purpose == Purpose.PARAMETER_GATHER
            }
            self._estimates[key] = [
                _as_partly_released(
                    row, usual.get((row.issued_op, row.group_size, row.groups), 0), released.share
                )
                for row in self._of_micro_batch(order, iteration, released._replace(share=1.0))
            ]
        return self._estimates[key]

    @cached_property
    def _without_frozen(self) -> Request | None:
        """The same of the trained parameters alone; None where there are no others or they are not gathered in passes."""
        trained = [each for each in self.parameters if each.requires_grad]
        if (
            self.configuration is None
            or self.configuration.stage != 3
            or len(trained) == len(self.parameters)
        ):
            return None
        return replace(self, parameters=trained, _rows={}, _estimates={}, notes=[])

    def _of_pass(
        self, does: Pass, order: tuple[str, ...] | None, number: int, released: Released
    ) -> list[Expectation]:
        """What micro-batch ``number`` sends, by what it ``does`` about the order of modules."""
        is_first = not number
        opens_step = not number % self.micro_steps and not is_first
        steady = self._alike(max(number, STEADY))
        # Until the step ends, what stays gathered has to be gathered by the micro-batch that compares the order.
        compares = steady if opens_step and self.micro_steps > 1 else 1
        gathers, checks = {
            Pass.RECORDS: (0, 0),
            Pass.COMPARES: (compares, 1),
            Pass.FOLLOWS: (steady, steady),
            Pass.COMPARES_AND_DEPARTS: (0, 1),
            Pass.DEPARTS: (0, steady),
        }[does]
        key = order, gathers, checks, is_first, released
        if key not in self._estimates:
            check = Purpose.TRACE_CHECK
            rows = [row for row in self._of_micro_batch(order, checks) if row.purpose == check]
            rows_of_pass = self._of_micro_batch(order, gathers, released)
            others = [row for row in rows_of_pass if row.purpose != check]
            # What stays gathered from an earlier step need not be gathered by those that follow no order.
            there = 0 if gathers or is_first or released.share == 1 else self._kept_gather_bytes(order)
            self._estimates[key] = rows + [_as_estimate(row, there) for row in others]
        return self._estimates[key]

    def _kept_gather_bytes(self, order: tuple[str, ...] | None) -> int:
        rows = self._expected(_Asked(order, None, False))
        gathers = (row for row in rows if row.when == "step" and row.purpose == Purpose.PARAMETER_GATHER)
        return sum(row.payload_bytes for row in gathers)

    def skips(self, key: StepKey) -> bool:
        """Whether step ``key``, at stage 0, was not taken since a gradient overflowed; no message shows it."""
        partitions = self.configuration is None or self.configuration.partitions
        return not partitions and self.shared is None and key in self.metrics.skipped

    @property
    def replicas(self) -> int:
        """Ranks that reduce gradients with each other."""
        if self.shared is None:
            return self.world_size
        return self.shared.axes.size(DATA) * self.shared.axes.size(SEQUENCE)

    def _kind(self, key: StepKey) -> int | None:
        """A micro-batch that sends the same as those of step ``key``, where steps are of several kinds; else None."""
        step = self._counted(key)
        kind = zero_stages.kind_of_step(self.config, step) if self.runtime == "zero_runtime" else ""
        if not kind:
            return None
        return self._kinds.setdefault(kind, step) * self.micro_steps

    def _counted(self, key: StepKey) -> int:
        """The number by which the rules know step ``key``."""
        return zero_stages.step_that_counts(self.config, key.step, self.metrics.skipped_before(key))

    def _alike(self, iteration: int) -> int:
        """The first micro-batch that the rules treat as they treat number ``iteration``."""
        steady = -(-STEADY // self.micro_steps) * self.micro_steps
        return iteration if iteration < steady else steady + iteration % self.micro_steps

    def rows(self) -> list[Expectation]:
        """All that the rules ask for, by when it is sent, whatever order of gradients the run published.

        Raises:
            CommprofError: the rules do not cover the config.
        """
        if self.wrapped is not None:
            return self.wrapped.rows()
        rows = self._expected(_Asked(None, None, self.construction or False))
        return rows if self.experts is None else [*rows, *self.experts.usual()]

    @property
    def unpredicted(self) -> Mapping[str, str]:
        """Purposes that the rules do not predict, and why."""
        return {} if self.wrapped is None else self.wrapped.unpredicted

    @property
    def unpublished(self) -> Mapping[str, str]:
        """Purposes of which a step that did not reach its end may have sent more than was published, and why."""
        return {} if self.wrapped is None else self.wrapped.unpublished

    @property
    def parameters_text(self) -> str:
        """How many parameters they are of: ``12 parameters``, of wrappers ``24 parameters of 2 models``."""
        lists = [] if self.wrapped is None else self.wrapped.parameter_lists
        number = sum(map(len, lists)) if lists else len(self.parameters)
        models = f" of {len(lists)} models" if len(lists) > 1 else ""
        return f"{number} parameter{'' if number == 1 else 's'}{models}"

    @property
    def rules(self) -> str:
        """Whose rules they are."""
        return "torch" if self.wrapped is not None else self.runtime

    def _expected(self, asked: _Asked) -> list[Expectation]:
        if asked not in self._rows:
            try:
                self._rows[asked] = self._by_rules(asked)
            except CommprofError as error:
                if asked.order is None:
                    raise
                self.notes.append(f"the order of gradients that the run published was not used: {error}")
                self._rows[asked] = self._by_rules(asked._replace(order=None))
        return self._rows[asked]

    def _by_rules(self, asked: _Asked) -> list[Expectation]:
        if self.shared is not None:
            return self.shared.expected(
                self.config,
                self.parameters,
                asked.scale,
                asked.order,
                backend=self.backend,
                runtime=self.runtime,
                iteration=asked.iteration,
                zero_init=asked.zero_init,
                released_by=asked.released_by,
            )
        return zero_stages.expected(
            self.config,
            self.parameters,
            self.world_size,
            asked.order,
            self.backend,
            self.runtime,
            iteration=asked.iteration,
            zero_init=asked.zero_init,
            released_by=asked.released_by,
            host_ranks=self.host_ranks,
            grid=self.grid,
            costs=self.costs,
        )


def request_of(run: RecordedRun) -> Request:
    """What ``run``'s config asks for."""
    manifest = run.manifest
    if any(each.get("share_steps") for each in manifest.engines):
        return Request(reason=SHARED_STEPS)
    if manifest.effective_config is None and run.table("wrappers").num_rows:
        return _request_of_wrappers(run)
    config, source, reason = _chosen_config(manifest.config, manifest.effective_config)
    if reason is not None or config is None:
        return Request(reason=reason or NO_CONFIG)
    parameters = run.table("parameters")
    if not parameters.num_rows:
        return Request(reason=NO_PARAMETERS, config=config, source=source)
    world_size = manifest.world_size or run.health.ranks_expected or 1
    request = Request(
        config=config,
        source=source,
        parameters=parameters_of(parameters),
        world_size=world_size,
        backend=_backend(run.parts("collectives", ["backend", "group_size"])),
        runtime="deepspeed" if str(manifest.engine or "").lower().startswith("deepspeed") else "zero_runtime",
        orders=gradient_orders(run),
        host_ranks=_host_ranks(run.table("groups"), manifest.nproc),
        grid=_grid(run.table("groups"), world_size),
        costs=_costs(manifest.effective_config),
        metrics=engine_metrics_of(run.parts("metrics", OF_METRICS)),
        construction=_construction(manifest.construction, parameters.num_rows),
    )
    try:
        request.configuration = _as_runtime_reads(read_configuration(config), request.runtime)
        request.shared = shared_model_of(
            run, manifest.effective_config, config, request.parameters, world_size
        )
        if request.shared is None:
            request.micro_steps = zero_stages.micro_steps(config, world_size)
            request.experts = _experts(run, request)
        else:
            request.micro_steps = axis_rules.micro_batches(config, request.shared.axes)
            request.notes += request.shared.notes
        request.expectations(StepKey(0, 0))
        request.differences = _differences(request, manifest.effective_config)
    except CommprofError as error:
        request.reason = str(error)
    return request


def _experts(run: RecordedRun, request: Request) -> ExpertTokens | None:
    """The layers of experts.

    Raises:
        CommprofError: the sizes of a layer do not fit together, or an earlier version recorded the run.
    """
    if any(_OF_EXPERTS in each.name and each.ep_size is None for each in request.parameters):
        raise UnsupportedError(
            "ep_size", None, "an earlier version of commprof recorded this run with experts"
        )
    configuration = read_configuration(request.config)
    element_bytes = token_bytes(request.parameters, configuration.model_dtype, autocast_dtype(request.config))
    ranks = RankGroups(request.world_size, configuration.data_before_experts)
    states_type = configuration.model_dtype is not None
    collectives = () if states_type else run.parts("collectives", OF_TYPES)
    return expert_tokens_of(run, request.parameters, element_bytes, ranks, collectives)


def _request_of_wrappers(run: RecordedRun) -> Request:
    """What the arguments of the wrappers ask for, in which the program trains its models."""
    request = Request(
        parameters=parameters_of(run.table("parameters")),
        world_size=run.manifest.world_size or run.health.ranks_expected or 1,
        backend=_backend(run.parts("collectives", ["backend", "group_size"])),
        orders=gradient_orders(run),
    )
    try:
        with reading_wrappers():
            request.wrapped = wrapped_models_of(run, request.orders)
            if request.wrapped is None:
                return Request(reason=NO_CONFIG)
            request.source = f"the arguments of {request.wrapped.names}"
            request.expectations(StepKey(0, 0))
    except CommprofError as error:
        request.reason = str(error)
    return request


def _as_runtime_reads(configuration: Configuration, runtime: zero_stages.Runtime) -> Configuration:
    """DeepSpeed does not know ``gradient_reduction``, nor compression."""
    if runtime == "zero_runtime":
        return configuration
    return configuration.as_deepspeed_reads()


def _chosen_config(
    written: Mapping[str, Any] | None, effective: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, str, str | None]:
    """The config to read, where it comes from, and why there is none."""
    if written is not None and why_no_zero_config(written) is None:
        try:
            read_configuration(written)
        except CommprofError as error:
            if effective is None:
                return None, "", str(error)
        else:
            return filled(written, effective), "the config file", None
    if effective is not None:
        return without_derived_reduction(effective), "the engine's own config", None
    return None, "", why_no_zero_config(written)


def why_no_zero_config(config: Mapping[str, Any] | None) -> str | None:
    """Why ``config`` is not one of ZeRO; None when it is."""
    if config is None:
        return NO_CONFIG
    return None if any(key in config for key in _DEEPSPEED_KEYS) else NOT_ZERO


def parameters_of(table: pa.Table) -> list[zero_stages.Parameter]:
    """The rows of the ``parameters`` table as the rules take them: what the lowest rank holds."""
    listed = [
        zero_stages.Parameter(*(row[name] for name in zero_stages.Parameter._fields))
        for row in table.to_pylist()
    ]
    return of_one_rank(listed)


def without_derived_reduction(effective: Mapping[str, Any]) -> dict[str, Any]:
    """``effective`` without a gradient_reduction that follows from its other keys: the user need not have set it."""
    section = effective.get("zero_optimization")
    if not isinstance(section, Mapping):
        return dict(effective)
    other_keys = {name: value for name, value in section.items() if name != "gradient_reduction"}
    asked = {**effective, "zero_optimization": other_keys}
    try:
        followed = read_configuration(asked).reduction
        if read_configuration(effective).reduces_whole_in_buckets:
            return dict(effective)
    except CommprofError:
        return dict(effective)
    return asked if followed == section.get("gradient_reduction") else dict(effective)


def _differences(request: Request, effective: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Keys that the engine read differently from the config, where that changes what should be sent."""
    if effective is None:
        return ()
    engine = replace(
        request, config=without_derived_reduction(effective), orders={}, _rows={}, _estimates={}, notes=[]
    )
    try:
        written, used = asdict(read_configuration(request.config)), asdict(read_configuration(effective))
        if request.shared is None:
            engine.micro_steps = zero_stages.micro_steps(engine.config, engine.world_size)
        plain = replace(request, orders={}, _rows={}, _estimates={}, notes=[])
        keys = (StepKey(0, -1), StepKey(0, 0))
        if all(_sums(plain.expectations(key)) == _sums(engine.expectations(key)) for key in keys):
            return ()
    except CommprofError:
        return ()
    return tuple(
        f"{name} is {written[name]} in the config and {used[name]} in the engine"
        for name in written
        if name not in _RESOLVED and written[name] != used[name]
    )


def _sums(rows: Sequence[Expectation]) -> set[tuple[str, str, int, int]]:
    return {(row.purpose, row.issued_op, row.count, row.payload_bytes) for row in rows}


def _host_ranks(groups: pa.Table, started: int | None) -> int | None:
    """Ranks of each host: those of the groups that are called so, or as many as the launcher started here."""
    named = {row["group_size"] for row in groups.to_pylist() if row["group_desc"] == HOST}
    return named.pop() if len(named) == 1 else started


def _grid(groups: pa.Table, world_size: int) -> tuple[int, ...]:
    """The sizes of the axes that zero_runtime has named groups by, outermost first; one axis where there are none."""
    named = {
        match["sizes"] for row in groups.to_pylist() if (match := AXIS.fullmatch(row["group_desc"] or ""))
    }
    shapes = {tuple(map(int, sizes.split("x"))) for sizes in named}
    return shapes.pop() if len(shapes) == 1 else (world_size,)


def _costs(effective: Mapping[str, Any] | None) -> object:
    """What the engine read in the files of ``communication.calibration``, as it says itself."""
    block = (effective or {}).get("communication")
    return block.get("measured_costs") if isinstance(block, Mapping) else None


def _construction(entry: object, parameters: int) -> Construction | None:
    """How the engine says that its parameters were made; None where it does not, or not of as many as ``parameters``."""
    if not isinstance(entry, Mapping):
        return None
    sharded, unsharded = _sizes(entry.get("sharded")), _sizes(entry.get("whole"))
    of_model = entry.get("sharded_of_model")
    if sharded is None or unsharded is None or type(of_model) is not int:
        return None
    return Construction(sharded, unsharded) if of_model + len(unsharded) == parameters else None


def _sizes(pairs: object) -> tuple[int, ...] | None:
    """Sizes of pairs of a size and how many there are; None where it is no list of pairs."""
    if not isinstance(pairs, list):
        return None
    sizes: list[int] = []
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(each) is int for each in pair)):
            return None
        size, count = pair
        if size < 0 or not 0 <= count <= MOST_PARAMETERS:
            return None
        sizes += [size] * count
    return tuple(sizes)


def _gather_bytes(rows: Iterable[Expectation]) -> int:
    return sum(row.payload_bytes for row in rows if row.purpose == Purpose.PARAMETER_GATHER)


def _as_far_as_frozen_modules_run(row: Expectation, least: int) -> Expectation:
    """``row``, of gathers, down to the ``least`` bytes: a module whose parameters are all frozen may never run.

    Which trained modules run is known by their gradients.
    """
    if row.purpose != Purpose.PARAMETER_GATHER:
        return row
    most = row.payload_bytes if row.bytes_exact else row.most_bytes
    return row._replace(
        bytes_exact=False,
        least_bytes=min(row.least_bytes, least),
        most_bytes=most,
        estimate=row.estimate or "which frozen modules run",
    )


def _as_partly_released(row: Expectation, usual: int, share: float) -> Expectation:
    """``row``, of gathers; bytes beyond the ``usual`` are of persistent parameters, a ``share`` of which was released."""
    if row.purpose != Purpose.PARAMETER_GATHER:
        return row
    added = max(0, row.payload_bytes - usual)
    most = row.payload_bytes if row.bytes_exact else row.most_bytes
    return row._replace(
        payload_bytes=row.payload_bytes - round(added * (1 - share)),
        exact=False,
        bytes_exact=False,
        least_bytes=max(0, row.least_bytes - added),
        most_bytes=most,
        estimate=row.estimate or "which parameters the program released",
    )


def _as_estimate(row: Expectation, there: int) -> Expectation:
    """``row``, of gathers, as an estimate of at least what it says but for the ``there`` bytes that are gathered already."""
    if row.purpose != Purpose.PARAMETER_GATHER:
        return row
    least = max(0, row.least_bytes - there)
    return row._replace(exact=False, bytes_exact=False, least_bytes=least, most_bytes=None, estimate="")


def _backend(tables: Iterable[pa.Table]) -> str:
    """The backend of most records of the largest groups."""
    counts: Counter[tuple[int, str]] = Counter()
    for part in tables:
        for (backend, size), places in combinations(part, ["backend", "group_size"]):
            if backend:
                counts[size, str(backend)] += len(places)
    largest = max(counts, key=lambda each: (each[0], counts[each]), default=None)
    return largest[1] if largest else "gloo"
