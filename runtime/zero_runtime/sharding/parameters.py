"""Parameters of which each rank keeps a slice (stage 3), as an optimizer over pieces needs them.

The slices of a sub-group move into one flat buffer, so that writing this rank's piece writes all of them. A sub-group with
a slice in files has no such buffer: its piece is read slice by slice, and written likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from zero_runtime.gradient_reduction.reducer import ParameterGroup
from zero_runtime.optimizer_step.owned_shards import WHOLE, OwnedShards
from zero_runtime.sharding.residency import Residency
from zero_runtime.sharding.shards import Shard, shard_of


class _Slot(NamedTuple):
    """Where a slice lies: from element ``start`` of the piece of sub-group ``group``."""

    shard: Shard
    group: int
    start: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.shard.slice_numel)


class ShardedParameters(OwnedShards):
    """Lays this rank's slices of each sub-group end to end.

    Args:
        groups: the sub-groups; their parameters have shards.
        residency: what gathers the parameters of the model.

    Attributes:
        own: for each sub-group, this rank's slices, padding included; 1-D; empty where some of them are in files.
    """

    def __init__(self, groups: Sequence[ParameterGroup], residency: Residency) -> None:
        self._residency = residency
        self._groups: list[ParameterGroup] = []
        self._slots: list[list[_Slot]] = []  # of each sub-group
        self.own: list[torch.Tensor] = []
        self.add(groups)

    def add(self, groups: Sequence[ParameterGroup]) -> None:
        """Take over the slices of further sub-groups."""
        for each in groups:
            slots = _slots(len(self._groups), each)
            self._groups.append(each)
            self._slots.append(slots)
            self.own.append(_flatten(each, slots))
            for slot in slots:
                slot.shard.changed = False

    def master(self, index: int, dtype: torch.dtype, part: slice = WHOLE) -> torch.Tensor:
        """What the optimizer updates in place of a part of piece ``index``, where the parameters are used."""
        first = self._groups[index].parameters[0]
        if not self.are_filed(index):
            return super().master(index, dtype, part).detach().to(first.device).requires_grad_()
        begin, end, _ = part.indices(self._groups[index].layout.shard_numel)
        wide = torch.promote_types(first.dtype, dtype)
        master = torch.zeros(end - begin, dtype=wide, device=first.device)
        self.read(index, master, part)
        return master.requires_grad_()

    def is_master(self, index: int, dtype: torch.dtype) -> bool:
        """Whether ``master`` gives the memory of piece ``index`` itself."""
        beside = self.own[index].device == self._groups[index].parameters[0].device
        return not self.are_filed(index) and beside and super().is_master(index, dtype)

    def are_filed(self, index: int) -> bool:
        """Whether a part of piece ``index`` is in files."""
        return self.own[index].numel() != self._groups[index].layout.shard_numel

    def begin_to_read(self, index: int, part: slice = WHOLE) -> None:
        """That part of piece ``index`` is read next: begin to, where it is in files."""
        if self.are_filed(index):
            for slot, within, _ in self._overlaps(index, part):
                slot.shard.begin_to_read(within)

    @torch.no_grad()
    def read(self, index: int, target: torch.Tensor, part: slice = WHOLE) -> None:
        """Fill ``target``, which is as long as the ``part`` of piece ``index``, with its values."""
        if not self.are_filed(index):
            super().read(index, target, part)
            return
        for slot, within, there in self._overlaps(index, part):
            slot.shard.read(target[there], within.start)

    @torch.no_grad()
    def write(self, index: int, master: torch.Tensor, part: slice = WHOLE) -> None:
        """Make the values of ``master`` those of that ``part`` of piece ``index``; for files this only begins to."""
        if not self.are_filed(index):
            super().write(index, master, part)
            return
        for slot, within, there in self._overlaps(index, part):
            slot.shard.write(master[there], within.start)

    def _overlaps(self, index: int, part: slice) -> Iterator[tuple[_Slot, slice, slice]]:
        """The slices that lie in a part of piece ``index``: elements of each, and where they are in the part."""
        begin, end, _ = part.indices(self._groups[index].layout.shard_numel)
        for slot in self._slots[index]:
            first, last = max(begin, slot.span.start), min(end, slot.span.stop)
            if first < last:
                yield slot, slice(first - slot.start, last - slot.start), slice(first - begin, last - begin)

    def begin_step(self) -> Sequence[tuple[int, slice]]:
        """Give up every whole parameter: it is about to change.

        Returns:
            What a script has changed in ``own`` since the last call: number of the sub-group, and part of it.
        """
        self._residency.release_all()
        return self.changes()

    def changes(self) -> Sequence[tuple[int, slice]]:
        """What ``begin_step`` returns, without giving anything up."""
        changed = []
        for slot in (slot for slots in self._slots for slot in slots):
            if slot.shard.changed:
                slot.shard.changed = False
                changed.append((slot.group, slot.span))
        return changed

    def share(self) -> None:
        """Gather the parameters that stay whole between steps; the next forward gathers the others."""
        self._residency.parameters_changed()


def _slots(index: int, each: ParameterGroup) -> list[_Slot]:
    slots, start = [], 0
    for parameter in each.parameters:
        shard = shard_of(parameter)
        assert shard is not None
        slots.append(_Slot(shard, index, start))
        start += shard.slice_numel
    return slots


def _flatten(each: ParameterGroup, slots: Sequence[_Slot]) -> torch.Tensor:
    """The slices end to end in new memory, where all of them are in memory; else nothing."""
    first = each.parameters[0]
    if any(slot.shard.pager is not None for slot in slots):
        return torch.empty(0, dtype=first.dtype)
    flat = slots[0].shard.place.zeros(each.layout.shard_numel, first)
    for slot in slots:
        slot.shard.move(flat[slot.span])
    return flat
