"""The requested level of runs whose models are wrapped by DistributedDataParallel or FSDP.

It is computed by the rules of the wrappers. Two inputs come from the run, because no argument determines them: the
passes of each step and the order of the gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa

from commprof.errors import CommprofError
from commprof.ledger.records.issued import INIT_STEP, StepKey
from commprof.requested.errors import RequestedError
from commprof.requested.expectation import Expectation
from commprof.requested.parallel.tensor_parallel import TensorParallel
from commprof.requested.wrappers.arguments import ShardedModel, Wrapper, arguments_of, tensors_of
from commprof.requested.wrappers.ddp import Ddp, with_order
from commprof.requested.wrappers.fsdp import Fsdp
from commprof.requested.wrappers.fully_shard import FullyShard, arguments_model
from commprof.requested.wrappers.zero_redundancy import ZeroRedundancy
from commprof.schema import Purpose, parse_ranks

NAMES: Final = {
    "ddp": "DistributedDataParallel",
    "fsdp": "FullyShardedDataParallel",
    "fully_shard": "fully_shard",
    "tensor_parallel": "parallelize_module",
    "zero_redundancy_optimizer": "ZeroRedundancyOptimizer",
}

_MODELS: Final = ("ddp", "fsdp", "fully_shard")  # The other wrappers wrap parts of models, or optimizers.
_SEVERAL: Final = "the program has several models, and it is not known which of them clip their gradients"
# Purposes of the messages that wrappers send in passes.
_OF_PASSES: Final = (
    Purpose.PARAMETER_GATHER,
    Purpose.GRADIENT_REDUCE,
    Purpose.GRADIENT_NORM,
    Purpose.ACTIVATION,
    Purpose.BUFFER_BROADCAST,
    Purpose.UNUSED_PARAMETERS,
    Purpose.BUCKET_REBUILD,
    Purpose.PARAMETER_BROADCAST,  # ZeroRedundancyOptimizer
)
_UNPUBLISHED: Final = "the program stopped then, so not all passes that it began were recorded"
_MOST_STEPS: Final = 10_000_000  # A larger number of steps of an attempt is damaged.


class Tables(Protocol):
    """The members of a run that this module uses. ``commprof.trace.reader.Run`` implements them."""

    def table(self, name: str) -> pa.Table:
        """Return table ``name`` of the schema."""


class Rules(Protocol):
    """The rules of a wrapper for one model."""

    @property
    def wrapper(self) -> Wrapper:
        """The wrapper and its arguments."""

    @property
    def unpredicted(self) -> Mapping[str, str]:
        """The purposes that the rules do not predict, with the reason."""

    def construction(self) -> list[Expectation]:
        """Return the messages that the wrapper sends when it is constructed."""

    def passes(self, passes: str, state: Any) -> tuple[list[Expectation], Any]:
        """Return the messages that the wrapper sends in ``passes``, and its state after these passes."""


class _Model(NamedTuple):
    rules: Rules
    attempt: int
    rank: int
    number: int  # the number of the model within its process
    made_in: int  # the step in which the model was wrapped
    passes: Mapping[int, str]  # the passes by the first step that ran them


class WrappedModels:
    """The wrapped models of a run, and the expected messages of each step.

    Args:
        models: The models of the first rank of each group.
        last: The last step of each attempt.
    """

    def __init__(self, models: Sequence[_Model], last: Mapping[int, int]) -> None:
        self._models = models
        self._last = last
        self._by_step: dict[StepKey, list[Expectation]] | None = None

    @property
    def rules(self) -> list[Rules]:
        """The rules of each model."""
        return [model.rules for model in self._models]

    @property
    def last_passes(self) -> list[str]:
        """The passes of each model after their last change. Empty if the model published no passes."""
        return [model.passes[max(model.passes)] if model.passes else "" for model in self._models]

    @property
    def parameter_lists(self) -> list[tuple[str, ...]]:
        """The names of the parameters of each model that DDP or FSDP wraps. Each pipeline stage counts as a model."""
        lists: dict[tuple[int, tuple[str, ...]], None] = {}
        for model in self._models:
            rules = model.rules
            if rules.wrapper.kind in _MODELS:
                units = rules.units if isinstance(rules, ShardedModel) else (rules.wrapper,)
                names = tuple(each.name for unit in units for each in unit.parameters)
                lists[model.number, names] = None
        return [names for _, names in lists]

    @property
    def names(self) -> str:
        """The names of the wrappers as text."""
        kinds = dict.fromkeys(model.rules.wrapper.kind for model in self._models)
        return " and ".join(NAMES.get(kind, kind) for kind in kinds)

    @property
    def unpredicted(self) -> dict[str, str]:
        """The purposes that the rules do not predict, with the reason."""
        reasons_by_purpose: dict[str, dict[str, None]] = defaultdict(dict)
        for model in self._models:
            name = NAMES.get(model.rules.wrapper.kind, model.rules.wrapper.kind)
            for purpose, reason in model.rules.unpredicted.items():
                reasons_by_purpose[purpose][f"{name}: {reason}"] = None
        sharded = Counter(
            (each.attempt, each.rank) for each in self._models if each.rules.wrapper.kind == "fully_shard"
        )
        if sharded and max(sharded.values()) > 1:
            reasons_by_purpose[str(Purpose.GRADIENT_NORM)][_SEVERAL] = None
        return {purpose: "; ".join(reasons) for purpose, reasons in reasons_by_purpose.items()}

    @property
    def unpublished(self) -> dict[str, str]:
        """The purposes for which a stopped step may have sent more than was published, with the reason.

        A pass is published after its end, and the passes of a step are published when the next step begins. In
        addition, a unit of FSDP gathers the next unit while its own pass runs.
        """
        return dict.fromkeys(map(str, _OF_PASSES), _UNPUBLISHED)

    def expected(self, key: StepKey) -> list[Expectation]:
        """Return the expected messages of step ``key``. Steps with equal messages share one list.

        Raises:
            RequestedError: The passes of a model are not known, or its arguments cannot be read.
        """
        if self._by_step is None:
            self._by_step = self._walk()
        return self._by_step.get(key, [])

    def rows(self) -> list[Expectation]:
        """Return the expected messages before the first step and in the most common step."""
        self.expected(StepKey(0, INIT_STEP))
        steps = [sent for key, sent in (self._by_step or {}).items() if key.step > INIT_STEP and sent]
        usual = Counter(map(id, steps)).most_common(1)
        first = [row for key, sent in (self._by_step or {}).items() if key.step == INIT_STEP for row in sent]
        return [*first, *(next(sent for sent in steps if id(sent) == usual[0][0]) if usual else [])]

    def reductions(self) -> list[str]:
        """Return the operations that reduce gradients in the most common step, those with the most wire bytes first.

        Operations with equal wire bytes are ordered by their payload.

        Raises:
            RequestedError: The passes of a model are not known, or its arguments cannot be read.
        """
        sums: dict[str, tuple[float, int]] = {}
        for row in self.rows():
            if row.purpose == Purpose.GRADIENT_REDUCE:
                wire, payload = sums.get(row.requested_op, (0.0, 0))
                ranks = len(row.groups[0]) if row.groups else 1
                sums[row.requested_op] = wire + ranks * row.wire_bytes, payload + row.payload_bytes
        return sorted(sums, key=lambda op: sums[op], reverse=True)

    def _walk(self) -> dict[StepKey, list[Expectation]]:
        by_step: dict[StepKey, list[Expectation]] = {}
        joined: dict[tuple[int, ...], list[Expectation]] = {}
        for attempt, last in self._last.items():
            mine = [model for model in self._models if model.attempt == attempt]
            columns = [_of_steps(model, last) for model in mine]
            for number, sent in enumerate(zip(*columns, strict=True)):
                key = tuple(map(id, sent))
                if key not in joined:
                    joined[key] = [row for rows in sent for row in rows]
                by_step[StepKey(attempt, INIT_STEP + number)] = joined[key]
        return by_step


def _of_steps(model: _Model, last: int) -> list[list[Expectation]]:
    """Return the expected messages of one model for each step, beginning with the time before the first step."""
    by_step: list[list[Expectation]] = []
    known: dict[tuple[str, Any], tuple[list[Expectation], Any]] = {}
    passes, state = "", None
    for step in range(INIT_STEP, last + 1):
        passes = model.passes.get(step, passes)
        if (passes, state) not in known:
            known[passes, state] = model.rules.passes(passes, state)
        sent, state = known[passes, state]
        by_step.append([*model.rules.construction(), *sent] if step == model.made_in else sent)
    return by_step


@contextmanager
def reading_wrappers() -> Iterator[None]:
    """Convert errors that a damaged trace causes while tables of wrappers are read to RequestedError.

    Raises:
        RequestedError: The tables cannot be read.
    """
    try:
        yield
    except CommprofError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise RequestedError(
            f"the recorded arguments of the wrappers cannot be read: {type(error).__name__}: {error}"
        ) from error


def wrapped_models_of(
    run: Tables, orders: Mapping[StepKey, Sequence[tuple[str, ...]]]
) -> WrappedModels | None:
    """Return the wrapped models of ``run``, and None if the run published none.

    Args:
        run: The run whose tables are read.
        orders: The names of parameters in the order in which their gradients arrived, by step and micro-batch.

    Raises:
        RequestedError: The arguments of a wrapper cannot be read.
    """
    rows = run.table("wrappers").to_pylist()
    if not rows:
        return None
    by_wrapper: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["time_ns"]):
        by_wrapper[row["attempt"], row["rank"], row["pid"], row["number"]].append(row)
    passes: dict[tuple[int, ...], dict[int, str]] = defaultdict(dict)
    for row in run.table("wrapper_passes").to_pylist():
        passes[row["attempt"], row["rank"], row["pid"], row["number"]][row["step"]] = row["passes"]
    models = []
    units: dict[tuple[int, ...], list[list[dict[str, Any]]]] = defaultdict(list)
    for key, unit_rows in sorted(by_wrapper.items()):
        units[*key[:3], arguments_model(arguments_of(unit_rows[-1]["arguments"]), key[3])].append(unit_rows)
    for key, listed in units.items():
        unit_rows = listed[0]
        if any(_speaks(one[-1], key[1]) for one in listed):
            wrappers = [_wrapper(one[-1]) for one in listed]
            rules = _rules(wrappers, key[1], orders.values())
            made_in = max(unit_rows[0]["step"], INIT_STEP)
            models.append(_Model(rules, key[0], key[1], key[3], made_in, passes[key]))
    steps = run.table("steps").group_by("attempt").aggregate([("step", "max")]).to_pylist()
    last = {model.attempt: INIT_STEP for model in models} | {row["attempt"]: row["step_max"] for row in steps}
    if max(last.values(), default=0) > _MOST_STEPS:
        raise RequestedError(
            f"the table of steps has {max(last.values()):,} steps, expected at most {_MOST_STEPS:,}"
        )
    return WrappedModels(models, last)


def _speaks(row: Mapping[str, Any], rank: int) -> bool:
    """Return whether ``rank`` is the first rank of a group of the wrapper."""
    after = arguments_of(row["arguments"]).get("after_forward_ranks")
    groups = (row["group_ranks"], row["replica_ranks"], after)
    return any(rank == min(parse_ranks(text), default=-1) for text in groups if isinstance(text, str))


def _wrapper(row: Mapping[str, Any]) -> Wrapper:
    ranks = parse_ranks(row["group_ranks"])
    if not ranks:
        raise RequestedError(f"the group of wrapper {row['number']} has no ranks")
    return Wrapper(
        row["wrapper"],
        row["unit"],
        ranks,
        tensors_of(row["parameters"]),
        tensors_of(row["buffers"]),
        parse_ranks(row["replica_ranks"] or ""),
        arguments_of(row["arguments"]),
    )


def _rules(wrappers: Sequence[Wrapper], rank: int, orders: Iterable[Sequence[tuple[str, ...]]]) -> Rules:
    wrapper = wrappers[0]
    if wrapper.kind == "fsdp":
        return Fsdp(tuple(wrappers), rank)
    if wrapper.kind == "fully_shard":
        return FullyShard(tuple(wrappers), rank)
    if wrapper.kind == "ddp":
        rules = Ddp(wrapper)
        for order in [one for several in orders for one in several][::-1]:
            rules = with_order(rules, order)
            if rules.order is not None:
                break
        return rules
    if wrapper.kind == "tensor_parallel":
        return TensorParallel(wrapper)
    if wrapper.kind == "zero_redundancy_optimizer":
        return ZeroRedundancy(wrapper)
    raise RequestedError(f"no rules are known for the wrapper {wrapper.kind!r}")
