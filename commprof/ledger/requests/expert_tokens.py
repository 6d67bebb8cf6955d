"""What the layers of experts of a run should send in each step, by the tokens that the run published.

The table ``expert_loads`` says how many tokens each rank had in each forward pass, and how many of them chose each expert.
The rules say how many slots that makes, and so the bytes (:mod:`commprof.requested.experts.layers`). Of the collectives only
the element type is read, and only where the config does not say it: torch.autocast and the model's own casts decide it then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from commprof.ledger.records.issued import StepKey
from commprof.ledger.requests.wrapped_models import Tables
from commprof.requested.errors import RequestedError
from commprof.requested.expectation import Expectation, summed
from commprof.requested.experts.layers import ExpertLayer, expected_tokens, gets_gradient, token_messages
from commprof.requested.experts.rank_groups import RankGroups
from commprof.requested.parameters import Parameter
from commprof.requested.parameters import item_bytes as bytes_of
from commprof.schema import Op, Phase, Purpose

_LAYER: Final = (
    "layer",
    "num_experts",
    "ep_size",
    "k",
    "capacity_factor",
    "min_capacity",
    "drop_tokens",
    "hidden",
)
_PASS: Final = ("micro_step", "phase", "call", "layer")
_CALL: Final = ("attempt", "step", *_PASS, "rank")
OF_TYPES: Final = ("rank", "op", "purpose", "phase", "module", "dtype")
_BATCH: Final = 4096  # rows
_UNSEEN: Final = "the tokens of ranks that left no records"
_UNRECORDED: Final = "the tokens of this step, which were not recorded"


class ForwardPass(NamedTuple):
    """A forward pass of a layer on all ranks.

    Attributes:
        micro_step: micro-batch within the step.
        phase: a value of schema.Phase; backward where activation checkpointing repeats it.
        call: number of the pass within the layer, the micro-batch and the phase.
        layer: qualified name.
        loads: of each rank that recorded it: its tokens, and those of them that chose its fullest expert.
    """

    micro_step: int
    phase: str
    call: int
    layer: str
    loads: Mapping[int, tuple[int, int]]

    def slots(self, layer: ExpertLayer, group: Sequence[int]) -> int:
        """The slots of each expert for the tokens of a rank of ``group``, by those of its ranks that recorded the pass."""
        loads = [self.loads[rank] for rank in group if rank in self.loads]
        tokens, fullest = (max(each) for each in zip(*loads, strict=True))
        return layer._replace(tokens=tokens).capacity if layer.drop_tokens else min(fullest, tokens)


class _Pass(NamedTuple):
    """A forward pass of a layer in one expert-parallel group, and its part of the backward pass."""

    layer: str
    group: tuple[int, ...]
    slots: int
    repeats: bool  # activation checkpointing runs it again in the backward pass
    complete: bool  # the counts of all ranks of the group are known


@dataclass
class ExpertTokens:
    """The layers of experts of a run and their forward passes.

    Attributes:
        layers: with the tokens of most forward passes.
        ranks: of the run, and how they form groups.
        parameters: of a rank.
        item_bytes: of an element of a token.
        passes: those of each step, of layers whose experts are on several ranks.
    """

    layers: Mapping[str, ExpertLayer]
    ranks: RankGroups
    parameters: Sequence[Parameter]
    item_bytes: int
    passes: Mapping[StepKey, tuple[tuple[_Pass, int], ...]]
    _known: dict[object, list[Expectation]] = field(default_factory=dict)

    def expected(self, key: StepKey, micro_steps: int) -> list[Expectation]:
        """The messages of tokens of step ``key``, all its micro-batches together; none where no tokens were recorded."""
        if not self.passes or key.step < 0:
            return []
        passes = self.passes.get(key)
        if passes not in self._known:
            rows = self._usual(micro_steps) if passes is None else self._of_passes(passes)
            self._known[passes] = summed(rows, "step")
        return self._known[passes]

    def usual(self) -> list[Expectation]:
        """The messages of a micro-batch with as many tokens as most, spread evenly over the experts."""
        return (
            expected_tokens(self.layers.values(), self.parameters, self.item_bytes, self.ranks)
            if self.passes
            else []
        )

    def _of_passes(self, passes: Sequence[tuple[_Pass, int]]) -> list[Expectation]:
        rows = []
        for each, count in passes:
            layer = self.layers[each.layer]
            backwards = 0 if each.repeats else 1 + gets_gradient(each.layer, self.parameters)
            sent = token_messages(layer, (each.group,), self.item_bytes, backwards, each.slots)
            rows += count * (sent if each.complete else _estimated(sent, _UNSEEN))
        return rows

    def _usual(self, micro_steps: int) -> list[Expectation]:
        return micro_steps * _estimated(self.usual(), _UNRECORDED)


def expert_tokens_of(
    run: Tables,
    parameters: Sequence[Parameter],
    item_bytes: int,
    ranks: RankGroups,
    collectives: Iterable[pa.Table] = (),
) -> ExpertTokens | None:
    """The layers of experts of ``run``, and their forward passes; None where there are none.

    Args:
        run: whose tables are read.
        parameters: of a rank.
        item_bytes: of an element of a token.
        ranks: of the run.
        collectives: the columns :data:`OF_TYPES` of the records, if these say the element types of tokens.

    Raises:
        RequestedError: the sizes of a layer do not fit together.
    """
    described = {row["layer"]: row for row in run.table("expert_layers").to_pylist()}
    layers = {name: _layer(row) for name, row in described.items() if row["ep_size"] > 1 or _is_complete(row)}
    for layer in layers.values():
        if layer.ep_size > 1:
            layer.check()
    ranks.check(layer.ep_size for layer in layers.values())
    if not layers:
        return None
    for name, (sent, returned) in _element_bytes(collectives, layers).items():
        layers[name] = layers[name]._replace(sent_bytes=sent, returned_bytes=returned)
    tokens: dict[str, Counter[int]] = defaultdict(Counter)
    steps: dict[StepKey, Counter[_Pass]] = defaultdict(Counter)
    for key, passes in forward_passes(run.table("expert_loads")).items():
        for each in passes:
            if each.layer not in layers:
                continue
            layer = layers[each.layer]
            tokens[each.layer].update(sent for sent, _ in each.loads.values())
            for group in ranks.of_experts(layer.ep_size) if layer.ep_size > 1 else ():
                seen = sum(rank in each.loads for rank in group)
                if seen:
                    slots, complete = each.slots(layer, group), layer.drop_tokens or seen == len(group)
                    repeats = each.phase == Phase.BACKWARD
                    steps[key][_Pass(each.layer, group, slots, repeats, complete)] += 1
    usual = {
        name: layer._replace(tokens=tokens[name].most_common(1)[0][0] if tokens[name] else 0)
        for name, layer in layers.items()
    }
    known = {key: tuple(sorted(counts.items())) for key, counts in steps.items()}
    return ExpertTokens(usual, ranks, parameters, item_bytes, known)


def forward_passes(loads: pa.Table) -> dict[StepKey, list[ForwardPass]]:
    """The forward passes of training in the table ``expert_loads``, by step and in the order in which they ran."""
    by_pass: dict[tuple[StepKey, int, str, int, str], dict[int, tuple[int, int]]] = {}
    for row in sorted(_calls(loads), key=lambda row: row["time_ns_min"]):
        place = StepKey(row["attempt"], row["step"]), *(row[name] for name in _PASS)
        by_pass.setdefault(place, {})[row["rank"]] = row["sent_max"], row["tokens_max"]  # type: ignore[arg-type]
    passes: dict[StepKey, list[ForwardPass]] = defaultdict(list)
    for (key, micro_step, phase, call, layer), of_ranks in by_pass.items():
        passes[key].append(ForwardPass(micro_step, phase, call, layer, of_ranks))
    return passes


def _element_bytes(
    collectives: Iterable[pa.Table], layers: Mapping[str, ExpertLayer]
) -> dict[str, tuple[int, int]]:
    """Bytes of an element of the first two all_to_alls of each layer: of tokens, and of the results that return."""
    missing = {name for name, layer in layers.items() if layer.ep_size > 1}
    element_bytes: dict[tuple[int, str], list[int]] = defaultdict(list)
    sizes: dict[str, tuple[int, int]] = {}
    for part in collectives:
        wanted = {"op": Op.ALL_TO_ALL, "purpose": Purpose.ACTIVATION, "phase": Phase.FORWARD}
        for column, value in wanted.items():
            part = part.filter(pc.equal(part[column].cast(pa.string()), str(value)))
        for batch in part.select(["rank", "module", "dtype"]).to_batches(_BATCH):
            for row in batch.to_pylist() if missing else ():
                if row["module"] in missing and row["dtype"] is not None:
                    of_layer = element_bytes[row["rank"], row["module"]]
                    of_layer.append(bytes_of(row["dtype"]))
                    if len(of_layer) == 2:
                        sizes[row["module"]] = of_layer[0], of_layer[1]
                        missing.discard(row["module"])
        if not missing:
            break
    return sizes


def _is_complete(row: Mapping[str, Any]) -> bool:
    return all(row[name] is not None for name in _LAYER)


def _layer(row: Mapping[str, Any]) -> ExpertLayer:
    if not _is_complete(row):
        unknown = [name for name in _LAYER if row[name] is None]
        raise RequestedError(f"layer {row['layer']} of expert_layers has no {unknown[0]}; expected a value")
    return ExpertLayer(**{name: row[name] for name in _LAYER}, tokens=0)


def _estimated(rows: Sequence[Expectation], depends: str) -> list[Expectation]:
    return [
        each._replace(bytes_exact=False, least_bytes=0, most_bytes=None, estimate=depends) for each in rows
    ]


def _calls(loads: pa.Table) -> list[dict[str, Any]]:
    """The forward passes of training: tokens of each rank, and those of its fullest expert."""
    training = pc.and_(
        pc.greater_equal(loads["step"], 0), pc.not_equal(loads["phase"].cast(pa.string()), Phase.EVALUATION)
    )
    rows = loads.filter(training)
    largest = rows.group_by(list(_CALL)).aggregate([("sent", "max"), ("tokens", "max"), ("time_ns", "min")])
    calls: list[dict[str, Any]] = largest.to_pylist()
    return calls
