"""Determines the expected messages of the layers of experts in each step, from the tokens that the run published.

The table ``expert_loads`` contains the number of tokens of each rank in each forward pass, and how many of them chose
each expert. The rules derive the number of slots and the bytes from these numbers
(:mod:`commprof.requested.experts.layers`). Only the element type is read from the collectives, and only if the config
does not determine it. In this case torch.autocast and the model's own casts determine the type.
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
_BATCH: Final = 4096  # number of rows that are converted at a time
_UNSEEN: Final = "the tokens of ranks that left no records"
_UNRECORDED: Final = "the tokens of this step, which were not recorded"


class ForwardPass(NamedTuple):
    """A forward pass of a layer on all ranks.

    Attributes:
        micro_step: The micro-batch within the step.
        phase: A value of schema.Phase. It is backward if activation checkpointing repeats the pass.
        call: The number of the pass within the layer, the micro-batch and the phase.
        layer: The qualified name of the layer.
        loads: For each rank that recorded the pass: the number of its tokens, and the number of tokens that chose the
            most loaded expert.
    """

    micro_step: int
    phase: str
    call: int
    layer: str
    loads: Mapping[int, tuple[int, int]]

    def slots(self, layer: ExpertLayer, group: Sequence[int]) -> int:
        """Return the slots of each expert for the tokens of one rank of ``group``.

        Only the ranks of the group that recorded the pass are taken into account.
        """
        loads = [self.loads[rank] for rank in group if rank in self.loads]
        tokens, fullest = (max(each) for each in zip(*loads, strict=True))
        return layer._replace(tokens=tokens).capacity if layer.drop_tokens else min(fullest, tokens)


class _Pass(NamedTuple):
    """A forward pass of a layer in one expert-parallel group, with its backward pass."""

    layer: str
    group: tuple[int, ...]
    slots: int
    repeats: bool  # whether it is the repetition of a pass by activation checkpointing in the backward pass
    complete: bool  # whether the slots are known exactly


@dataclass
class ExpertTokens:
    """The layers of experts of a run and their forward passes.

    Attributes:
        layers: The layers by name, with the most common number of tokens of a forward pass.
        ranks: The ranks of the run and their groups.
        parameters: The parameters of a rank.
        item_bytes: The bytes of an element of a token.
        passes: The passes of each step with their counts, for layers whose experts are on several ranks.
    """

    layers: Mapping[str, ExpertLayer]
    ranks: RankGroups
    parameters: Sequence[Parameter]
    item_bytes: int
    passes: Mapping[StepKey, tuple[tuple[_Pass, int], ...]]
    _known: dict[object, list[Expectation]] = field(default_factory=dict)

    def expected(self, key: StepKey, micro_steps: int) -> list[Expectation]:
        """Return the messages of tokens in step ``key``, summed over its micro-batches.

        The list is empty if the run recorded no tokens. If only the tokens of this step were not recorded, the messages
        are an estimate.
        """
        if not self.passes or key.step < 0:
            return []
        passes = self.passes.get(key)
        if passes not in self._known:
            rows = self._usual(micro_steps) if passes is None else self._of_passes(passes)
            self._known[passes] = summed(rows, "step")
        return self._known[passes]

    def usual(self) -> list[Expectation]:
        """Return the messages of a micro-batch with the usual number of tokens, divided evenly over the experts."""
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
    """Return the layers of experts of ``run`` and their forward passes, and None if there are none.

    Args:
        run: The run whose tables are read.
        parameters: The parameters of a rank.
        item_bytes: The bytes of an element of a token.
        ranks: The ranks of the run and their groups.
        collectives: The columns :data:`OF_TYPES` of the records, if the element types of tokens must be read from them.

    Raises:
        RequestedError: The sizes of a layer contradict each other.
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
    """Return the forward passes of training in the table ``expert_loads``, by step and in the order of execution."""
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
    """Return the bytes of an element in the first two all_to_alls of each layer.

    The first all_to_all sends the tokens, and the second one returns the results.
    """
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
    """Return the forward passes of training, with the tokens of each rank and of its most loaded expert."""
    training = pc.and_(
        pc.greater_equal(loads["step"], 0), pc.not_equal(loads["phase"].cast(pa.string()), Phase.EVALUATION)
    )
    rows = loads.filter(training)
    largest = rows.group_by(list(_CALL)).aggregate([("sent", "max"), ("tokens", "max"), ("time_ns", "min")])
    calls: list[dict[str, Any]] = largest.to_pylist()
    return calls
