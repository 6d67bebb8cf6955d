"""Predicts the messages of ``fully_shard`` (FSDP 2) from the arguments and parameters of its units, torch 2.11 to 2.14.

Each unit gathers its parameters if they are sharded. The unit shards them again after a forward pass (depending on
``reshard_after_forward``) and after a backward pass. In a backward pass a unit also prefetches the previous unit. A
unit that reduces gradients sends them in one reduce_scatter. With a mesh of two dimensions (HSDP), the unit then sends
an all_reduce of its shard over the ranks that have the same shard. Each parameter is padded along its first dimension
to a multiple of the number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from commprof.requested.expectation import Expectation
from commprof.requested.parameters import item_bytes
from commprof.requested.wrappers.arguments import DISTRIBUTED, ShardedModel, Tensor, Wrapper
from commprof.requested.zero.partition import padded
from commprof.schema import Op, Purpose, parse_ranks

SHARDED, WHOLE, PARTLY = "S", "U", "P"
_PASS: Final = re.compile(
    r"(?P<kind>[FRpbkBurE])(?P<unit>\d+)?(?P<alone>~)?(-(?P<without>[\d.]+))?|N(?P<norms>\d*)"
)


class State(NamedTuple):
    """The state between two passes.

    Attributes:
        units: For each unit, the state of its parameters: ``SHARDED``, ``WHOLE`` or ``PARTLY``.
        order: The units whose forward passes have ended since the last backward pass.
        open: For each unit, the positions in ``order`` that a backward pass has not reached.
        reduced: For each unit, how many of its parameters have gradients.
    """

    units: tuple[str, ...]
    order: tuple[int, ...] = ()
    open: tuple[tuple[int, ...], ...] = ()
    reduced: tuple[int, ...] = ()


@dataclass(frozen=True)
class FullyShard(ShardedModel):
    """The rules for one model."""

    @property
    def unpredicted(self) -> dict[str, str]:
        """The purposes that the rules do not predict, each with the reason."""
        reasons = {str(Purpose.PARAMETER_BROADCAST): DISTRIBUTED}
        for unit in self.units:
            why = unit.arguments.get("unpredicted")
            if why:
                reasons[str(Purpose.PARAMETER_GATHER)] = reasons[str(Purpose.GRADIENT_REDUCE)] = str(why)
        if len({(unit.ranks, unit.arguments.get("mesh_dims")) for unit in self.units}) > 1 or any(
            unit.arguments.get("mesh_dims") for unit in self.units
        ):
            reasons[str(Purpose.GRADIENT_NORM)] = "norms over several meshes are not covered by the rules"
        return reasons

    def passes(self, passes: str, state: State | None) -> tuple[list[Expectation], State]:
        """Return the messages of ``passes``, and the state after them.

        Raises:
            RequestedError: a pass is not known.
        """
        count = len(self.units)
        now = _Units(self, state or State((SHARDED,) * count, (), ((),) * count, (0,) * count))
        for match in self.matches(passes, _PASS):
            now.run(match)
        return now.sent, now.state

    def by_pass(self, passes: str) -> list[tuple[str, list[Expectation]]]:
        """Return the kind and the messages of each of ``passes``, in a step that follows an equal step.

        Raises:
            RequestedError: a pass is not known.
        """
        _, state = self.passes(passes, None)
        now = _Units(self, state)
        kinds = []
        for match in self.matches(passes, _PASS):
            before = len(now.sent)
            now.run(match)
            kinds.append((match["kind"] or "N", now.sent[before:]))
        return kinds


class _Units:
    """The units of one model while passes run."""

    def __init__(self, rules: FullyShard, state: State) -> None:
        self._rules = rules
        self._states, self._order = list(state.units), list(state.order)
        self._open = [list(each) for each in state.open]
        self._reduced = list(state.reduced)
        self.sent: list[Expectation] = []

    @property
    def state(self) -> State:
        """The state for the next pass."""
        return State(
            tuple(self._states), tuple(self._order), tuple(map(tuple, self._open)), tuple(self._reduced)
        )

    def run(self, match: re.Match[str]) -> None:
        """Run one pass of one unit, and append its messages to ``sent``."""
        if match["norms"] is not None:
            self._norm(int(match["norms"]) if match["norms"] else None)
            return
        kind, number = match["kind"], int(match["unit"] or 0)
        unit = self._rules.units[number]
        if kind in "FRu":
            self._gather(number)
            if kind == "F":
                self._open[number].append(len(self._order))
                self._order.append(number)
                self._states[number] = _after_forward(unit)
        elif kind == "p":
            self._before_backward(number)
        elif kind in "br":
            self._states[number] = SHARDED
        elif kind == "B":
            without = {int(each) for each in (match["without"] or "").split(".") if each}
            self._reduced[number] = len(unit.trained) - len(without)
            self._reduce(unit, without, alone=bool(match["alone"]))
        elif kind == "E":
            self._order, self._open = [], [[] for _ in self._open]

    def _gather(self, number: int) -> None:
        unit, before = self._rules.units[number], self._states[number]
        self._states[number] = WHOLE
        if before == WHOLE or not shards(unit):
            return
        ranks = after_forward_ranks(unit) if before == PARTLY else unit.ranks
        if self._rules.speaks(ranks) and len(ranks) > 1:
            sizes = [gathered_bytes(unit)]
            self.sent += unit.sent(Purpose.PARAMETER_GATHER, Op.ALL_GATHER, sizes, ranks=ranks)

    def _before_backward(self, number: int) -> None:
        unit = self._rules.units[number]
        if unit.arguments.get("unshard_in_backward") is not False:
            self._gather(number)
        explicit = unit.arguments.get("prefetch")
        targets: Iterable[int] = explicit or ()
        if not explicit and self._open[number]:
            place = self._open[number].pop()
            targets = self._order[place - 1 : place] if unit.arguments.get("prefetches", True) else ()
        for target in targets:
            if self._rules.units[target].arguments.get("unshard_in_backward") is not False:
                self._gather(target)

    def _reduce(self, unit: Wrapper, without: set[int], *, alone: bool) -> None:
        reduced = [each for place, each in enumerate(unit.trained) if place not in without]
        world = len(unit.ranks) if shards(unit) else 1
        dtype = unit.arguments.get("reduce_dtype") or unit.arguments.get("param_dtype")
        size = _bytes(unit, reduced, world, dtype)
        if world > 1 and self._rules.speaks(unit.ranks):
            self.sent += unit.sent(Purpose.GRADIENT_REDUCE, Op.REDUCE_SCATTER, [size])
        reducing = unit.replicas if shards(unit) else (unit.replicas or unit.ranks)
        if len(reducing) > 1 and not alone and self._rules.speaks(reducing):
            self.sent += unit.sent(Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [size // world], ranks=reducing)

    def _norm(self, count: int | None) -> None:
        """Append the message that sums the norms of ``count`` gradients.

        Earlier versions recorded no number. None therefore means all gradients.
        """
        unit = self._rules.units[0]
        # Parameters that stay gathered after the backward pass show no gradients. Their shards have the gradients.
        seen = [
            number
            for number, each in enumerate(self._rules.units)
            if self._states[number] == SHARDED or not shards(each)
        ]
        trained = [each for number in seen for each in self._rules.units[number].trained]
        if (
            trained
            and str(Purpose.GRADIENT_NORM) not in self._rules.unpredicted
            and self._rules.speaks(unit.ranks)
        ):
            size = max(item_bytes(each.dtype) for each in trained)
            count = sum(self._reduced[each] for each in seen) if count is None else count
            self.sent += unit.sent(Purpose.GRADIENT_NORM, Op.ALL_REDUCE, [count * size])


def shards(unit: Wrapper) -> bool:
    """Return whether the parameters of ``unit`` are sharded."""
    return unit.arguments.get("shards") is not False


def after_forward_ranks(unit: Wrapper) -> tuple[int, ...]:
    """Return the ranks among which the parameters of ``unit`` are sharded between forward and backward pass."""
    text = unit.arguments.get("after_forward_ranks")
    return parse_ranks(text) if isinstance(text, str) else unit.ranks


def _after_forward(unit: Wrapper) -> str:
    if not unit.arguments.get("reshard_after_forward", True):
        return WHOLE
    return PARTLY if unit.arguments.get("after_forward_ranks") else SHARDED


def gathered_bytes(unit: Wrapper) -> int:
    """Return the payload bytes of the gather of the parameters of ``unit``."""
    return _bytes(unit, unit.parameters, len(unit.ranks), unit.arguments.get("param_dtype"))


def _bytes(unit: Wrapper, tensors: Sequence[Tensor], world: int, dtype: str | None) -> int:
    return sum(_padded_numel(each, world) * item_bytes(dtype or each.dtype) for each in tensors)


def _padded_numel(tensor: Tensor, world: int) -> int:
    """Return the number of elements of a parameter that is padded to divide evenly along its first dimension."""
    if not tensor.extents:
        return 1
    return padded(tensor.extents[0], world) * (tensor.numel // max(tensor.extents[0], 1))


def arguments_model(arguments: Mapping[str, Any], number: int) -> int:
    """Return the number under which the passes of a unit's model are recorded, by default ``number``."""
    model = arguments.get("model")
    return model if isinstance(model, int) else number
