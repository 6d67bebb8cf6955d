"""The requested level: the messages that the config requests in each step, by the rules of ``commprof.requested``.

The bytes of collectives are not read for this level, except for the activations of shared models. The buckets that the
runtime published only show the order in which gradients arrived. This order determines how gradients are split, and
not their bytes.
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
    "the program trains several engines whose steps have the same numbers, as in a GAN, and the records do not "
    "show which engine issued which collective"
)
_OF_EXPERTS: Final = ".deepspeed_experts."  # part of the names of parameters of experts
HOST: Final = "host"  # the name that zero_runtime gives to a group of the ranks of one host
AXIS: Final = re.compile(r"axis \d+ of (?P<sizes>\d+(x\d+)*)")  # the name of a group along an axis of a grid
MOST_PARAMETERS: Final = 10_000_000  # A larger number of parameters of one size is damaged.
# The config of a run with any of these keys is a config of DeepSpeed. Without zero_optimization it is stage 0.
_DEEPSPEED_KEYS: Final = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
# Keys that the engine resolves in its effective config, or that do not influence the messages.
_RESOLVED: Final = (
    "gradient_reduction",
    "reduce_scatter_impl",
    "train_batch_size",
    "micro_batch_size",
)


class RecordedRun(Protocol):
    """The members of a run that the ledger uses. ``commprof.trace.reader.Run`` implements them."""

    @property
    def path(self) -> Any:
        """The run directory."""

    @property
    def manifest(self) -> Any:
        """The ``commprof.trace.manifest.Manifest`` of the run."""

    @property
    def health(self) -> Any:
        """The ``commprof.trace.health.Health`` of the run."""

    def table(self, name: str) -> pa.Table:
        """Return table ``name`` of the schema."""

    def parts(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of table ``name`` in parts, with only ``columns`` if given."""


class WholeRun(RecordedRun, Protocol):
    """A run with all of its steps."""

    def without_records(self) -> RecordedRun:
        """Return the same run with an empty ``collectives`` table."""


def last_attempt(run: RecordedRun) -> int:
    """Return the number of the last attempt. All earlier attempts were stopped."""
    return max((entry["attempt"] for entry in run.manifest.ranks), default=0)


def recorded_ranks(run: RecordedRun) -> Mapping[int, Set[int]]:
    """Return the ranks of each attempt that have records."""
    ranks: dict[int, set[int]] = defaultdict(set)
    for entry in run.manifest.ranks:
        if entry["records"]:
            ranks[entry["attempt"]].add(entry["rank"])
    return ranks


class Released(NamedTuple):
    """The share of the persistent parameters that is released when a step begins (0 to 1), and who released them."""

    share: float = 0.0
    by: ReleasedBy = ""


NOTHING_RELEASED: Final = Released()


class _Asked(NamedTuple):
    """The arguments of ``zero_stages.expected``, and the factor of activations relative to a usual step."""

    order: tuple[str, ...] | None
    iteration: int | None
    zero_init: bool | Construction
    scale: Fraction = USUAL
    released_by: ReleasedBy = ""


@dataclass
class Request:
    """The request of a run.

    Attributes:
        reason: The reason why the request is not known. None if it is known.
        config: The config that the rules read.
        configuration: The config as the runtime reads it.
        source: The source of the config.
        differences: The keys whose values differ between the config file and the engine's own config.
        parameters: The parameters of the model, with the experts of one rank only.
        world_size: The number of ranks of the job.
        backend: The backend of most records of the largest groups.
        runtime: The runtime whose rules apply.
        micro_steps: The number of micro-batches of a step.
        orders: The order in which gradients arrived, by step and micro-batch.
        notes: Remarks for the report.
        shared: How the ranks share the model. None if each rank has the whole model.
        wrapped: The models that wrappers of torch train, if there is no engine. ``config`` is empty in this case.
        experts: The layers of experts and their tokens. None if there are no such layers.
        host_ranks: The number of ranks of each host, from the groups of hosts or the launcher. None if not known.
        grid: The sizes of the axes along which the groups of the run communicate, outermost first. One axis if there
            are no such groups.
        costs: The costs that the run used for sending messages along the axes. None if the run published no costs.
        metrics: The facts about steps that the engine published and that no message shows.
        construction: How the parameters were constructed, as reported by the engine. None if not reported.
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
    _kinds: dict[str, int] = field(default_factory=dict)  # kind of steps -> the first step of this kind
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
        """Return the expected messages of step ``key``. Step -1 is the time before the first step.

        Args:
            key: The attempt and the step.
            ordinal: The number of the step within its attempt. Stage 3 sends more in its first two micro-batches.
            zero_init: Whether the model was constructed within ``zero.Init``, which broadcasts it one time less at
                stage 3. Ignored if the engine published how each parameter was constructed.
            passes: How each micro-batch treats the order of modules, if an evaluation has changed this.
            released: The share of the persistent parameters that is released when the step begins.

        Raises:
            CommprofError: The rules do not cover the config.
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
        """Return the number of broadcasts of ``trace_check`` in a micro-batch that compares no order of modules."""
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
        """Return the expected messages of a micro-batch if a part of the persistent parameters is ``released``.

        The result is an estimate, because it is not known which parameters are released.
        """
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
        """The request with only the trained parameters. None if no parameter is frozen, or if the stage is not 3."""
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
        """Return the expected messages of micro-batch ``number``, which treats the order of modules as in ``does``."""
        is_first = not number
        opens_step = not number % self.micro_steps and not is_first
        steady = self._alike(max(number, STEADY))
        # The micro-batch that compares the order must gather the parameters that stay gathered until the step ends.
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
            # A micro-batch that follows no order need not gather parameters that stayed gathered from an earlier step.
            there = 0 if gathers or is_first or released.share == 1 else self._kept_gather_bytes(order)
            self._estimates[key] = rows + [_as_estimate(row, there) for row in others]
        return self._estimates[key]

    def _kept_gather_bytes(self, order: tuple[str, ...] | None) -> int:
        rows = self._expected(_Asked(order, None, False))
        gathers = (row for row in rows if row.when == "step" and row.purpose == Purpose.PARAMETER_GATHER)
        return sum(row.payload_bytes for row in gathers)

    def skips(self, key: StepKey) -> bool:
        """Return whether step ``key`` at stage 0 was skipped because a gradient overflowed. No message shows this."""
        partitions = self.configuration is None or self.configuration.partitions
        return not partitions and self.shared is None and key in self.metrics.skipped

    @property
    def replicas(self) -> int:
        """The number of ranks that reduce gradients with each other."""
        if self.shared is None:
            return self.world_size
        return self.shared.axes.size(DATA) * self.shared.axes.size(SEQUENCE)

    def _kind(self, key: StepKey) -> int | None:
        """Return a micro-batch of the first step of the same kind as step ``key``. None if steps have no kinds."""
        step = self._counted(key)
        kind = zero_stages.kind_of_step(self.config, step) if self.runtime == "zero_runtime" else ""
        if not kind:
            return None
        return self._kinds.setdefault(kind, step) * self.micro_steps

    def _counted(self, key: StepKey) -> int:
        """Return the number of step ``key`` in the rules."""
        return zero_stages.step_that_counts(self.config, key.step, self.metrics.skipped_before(key))

    def _alike(self, iteration: int) -> int:
        """Return the first micro-batch that the rules treat in the same way as micro-batch ``iteration``."""
        steady = -(-STEADY // self.micro_steps) * self.micro_steps
        return iteration if iteration < steady else steady + iteration % self.micro_steps

    def rows(self) -> list[Expectation]:
        """Return all expected messages with the time at which they are sent, without regard to the order of gradients.

        Raises:
            CommprofError: The rules do not cover the config.
        """
        if self.wrapped is not None:
            return self.wrapped.rows()
        rows = self._expected(_Asked(None, None, self.construction or False))
        return rows if self.experts is None else [*rows, *self.experts.usual()]

    @property
    def unpredicted(self) -> Mapping[str, str]:
        """The purposes that the rules do not predict, with the reason."""
        return {} if self.wrapped is None else self.wrapped.unpredicted

    @property
    def unpublished(self) -> Mapping[str, str]:
        """The purposes for which a stopped step may have sent more than was published, with the reason."""
        return {} if self.wrapped is None else self.wrapped.unpublished

    @property
    def parameters_text(self) -> str:
        """The number of parameters as text: ``12 parameters``, or for wrappers ``24 parameters of 2 models``."""
        lists = [] if self.wrapped is None else self.wrapped.parameter_lists
        number = sum(map(len, lists)) if lists else len(self.parameters)
        models = f" of {len(lists)} models" if len(lists) > 1 else ""
        return f"{number} parameter{'' if number == 1 else 's'}{models}"

    @property
    def rules(self) -> str:
        """The name of the software whose rules apply: ``torch`` for wrappers, otherwise the runtime."""
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
    """Return the request of ``run``, from its config or from the arguments of its wrappers."""
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
    """Return the layers of experts and their tokens, and None if there are no such layers.

    Raises:
        CommprofError: The sizes of a layer contradict each other, or an earlier version recorded the run.
    """
    if any(_OF_EXPERTS in each.name and each.ep_size is None for each in request.parameters):
        raise UnsupportedError(
            "ep_size",
            None,
            "an earlier version of commprof recorded this run, without the ep_size of its experts",
        )
    configuration = read_configuration(request.config)
    element_bytes = token_bytes(request.parameters, configuration.model_dtype, autocast_dtype(request.config))
    ranks = RankGroups(request.world_size, configuration.data_before_experts)
    states_type = configuration.model_dtype is not None
    collectives = () if states_type else run.parts("collectives", OF_TYPES)
    return expert_tokens_of(run, request.parameters, element_bytes, ranks, collectives)


def _request_of_wrappers(run: RecordedRun) -> Request:
    """Return the request of the wrappers that train the models of ``run``, from their arguments."""
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
    """Return ``configuration`` as ``runtime`` reads it. DeepSpeed ignores ``gradient_reduction`` and compression."""
    if runtime == "zero_runtime":
        return configuration
    return configuration.as_deepspeed_reads()


def _chosen_config(
    written: Mapping[str, Any] | None, effective: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, str, str | None]:
    """Return the config to read, its source, and the reason if there is no config."""
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
    """Return the reason why ``config`` is not a ZeRO config, and None if it is one."""
    if config is None:
        return NO_CONFIG
    return None if any(key in config for key in _DEEPSPEED_KEYS) else NOT_ZERO


def parameters_of(table: pa.Table) -> list[zero_stages.Parameter]:
    """Convert the rows of the ``parameters`` table for the rules. Only the experts of one rank are kept."""
    listed = [
        zero_stages.Parameter(*(row[name] for name in zero_stages.Parameter._fields))
        for row in table.to_pylist()
    ]
    return of_one_rank(listed)


def without_derived_reduction(effective: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``effective`` without its gradient_reduction if this value follows from the other keys.

    The user need not have set such a value.
    """
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
    """Return the keys that the engine read differently from the config, if this changes the expected messages."""
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
    """Return the number of ranks of each host.

    The number is the size of the groups with the name ``HOST``, or the number of ranks that the launcher started on
    this host.
    """
    named = {row["group_size"] for row in groups.to_pylist() if row["group_desc"] == HOST}
    return named.pop() if len(named) == 1 else started


def _grid(groups: pa.Table, world_size: int) -> tuple[int, ...]:
    """Return the sizes of the axes in the group names of zero_runtime, outermost first. One axis if there are none."""
    named = {
        match["sizes"] for row in groups.to_pylist() if (match := AXIS.fullmatch(row["group_desc"] or ""))
    }
    shapes = {tuple(map(int, sizes.split("x"))) for sizes in named}
    return shapes.pop() if len(shapes) == 1 else (world_size,)


def _costs(effective: Mapping[str, Any] | None) -> object:
    """Return the costs that the engine read from the files of ``communication.calibration`` and published."""
    block = (effective or {}).get("communication")
    return block.get("measured_costs") if isinstance(block, Mapping) else None


def _construction(entry: object, parameters: int) -> Construction | None:
    """Return how the parameters were constructed, as reported by the engine.

    None if the engine reported nothing, or if the number of reported parameters is not ``parameters``.
    """
    if not isinstance(entry, Mapping):
        return None
    sharded, unsharded = _sizes(entry.get("sharded")), _sizes(entry.get("whole"))
    of_model = entry.get("sharded_of_model")
    if sharded is None or unsharded is None or type(of_model) is not int:
        return None
    return Construction(sharded, unsharded) if of_model + len(unsharded) == parameters else None


def _sizes(pairs: object) -> tuple[int, ...] | None:
    """Expand pairs of a size and a count to a list of sizes. None if ``pairs`` is not a list of pairs."""
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
    """Lower the lower bound of ``row`` to ``least`` bytes if it is a gather.

    A module whose parameters are all frozen may never run. The trained modules that run are known from their gradients.
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
    """Reduce the bytes of ``row`` if it is a gather, since only a ``share`` of the persistent parameters was released.

    The bytes beyond ``usual`` belong to persistent parameters.
    """
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
    """Return ``row`` as an estimate if it is a gather. Its lower bound excludes ``there`` bytes, already gathered."""
    if row.purpose != Purpose.PARAMETER_GATHER:
        return row
    least = max(0, row.least_bytes - there)
    return row._replace(exact=False, bytes_exact=False, least_bytes=least, most_bytes=None, estimate="")


def _backend(tables: Iterable[pa.Table]) -> str:
    """Return the backend of most records of the largest groups."""
    counts: Counter[tuple[int, str]] = Counter()
    for part in tables:
        for (backend, size), places in combinations(part, ["backend", "group_size"]):
            if backend:
                counts[size, str(backend)] += len(places)
    largest = max(counts, key=lambda each: (each[0], counts[each]), default=None)
    return largest[1] if largest else "gloo"
