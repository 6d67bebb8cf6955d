"""The view of sharded parameters (stage 3) through which the sharded optimizer reads and writes them.

The shards of a sub-group are moved into one flat buffer, so that one write changes all of them. A sub-group
with a shard on NVMe has no such buffer. Its shards are read and written one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from zero_runtime.gradient_reduction.reducer import ParameterGroup
from zero_runtime.optimizer_step.owned_shards import WHOLE, OwnedShards
from zero_runtime.sharding.gather_schedule.residency import Residency
from zero_runtime.sharding.shards import Shard, shard_of


class _Slot(NamedTuple):
    """The position of a shard in a sub-group.

    The shard begins at element ``start`` of this rank's part of sub-group ``group``.
    """

    shard: Shard
    group: int
    start: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.shard.slice_numel)


class ShardedParameters(OwnedShards):
    """Concatenates this rank's shards of each sub-group.

    Args:
        groups: The sub-groups, whose parameters have shards.
        residency: The object that gathers the parameters of the model.

    Attributes:
        own: For each sub-group, this rank's shards including padding; 1-D. Empty if some shards are on NVMe.
    """

    def __init__(self, groups: Sequence[ParameterGroup], residency: Residency) -> None:
        self._residency = residency
        self._groups: list[ParameterGroup] = []
        self._slots: list[list[_Slot]] = []  # the slots of each sub-group
        self.own: list[torch.Tensor] = []
        self.add(groups)

    def add(self, groups: Sequence[ParameterGroup]) -> None:
        """Take over the shards of additional sub-groups."""
        for each in groups:
            slots = _slots(len(self._groups), each)
            self._groups.append(each)
            self._slots.append(slots)
            self.own.append(_flatten(each, slots))
            for slot in slots:
                slot.shard.changed = False

    def master(self, index: int, dtype: torch.dtype, part: slice = WHOLE) -> torch.Tensor:
        """Return the master of a part of sub-group ``index``, on the device of the parameters."""
        first = self._groups[index].parameters[0]
        if not self.are_filed(index):
            return super().master(index, dtype, part).detach().to(first.device).requires_grad_()
        begin, end, _ = part.indices(self._groups[index].layout.shard_numel)
        wide = torch.promote_types(first.dtype, dtype)
        master = torch.zeros(end - begin, dtype=wide, device=first.device)
        self.read(index, master, part)
        return master.requires_grad_()

    def is_master(self, index: int, dtype: torch.dtype) -> bool:
        """Return whether ``master`` returns the memory of sub-group ``index`` itself."""
        beside = self.own[index].device == self._groups[index].parameters[0].device
        return not self.are_filed(index) and beside and super().is_master(index, dtype)

    def are_filed(self, index: int) -> bool:
        """Return whether a part of sub-group ``index`` is on NVMe."""
        return self.own[index].numel() != self._groups[index].layout.shard_numel

    def begin_to_read(self, index: int, part: slice = WHOLE) -> None:
        """Start to read ``part`` of sub-group ``index``, if it is on NVMe."""
        if self.are_filed(index):
            for slot, within, _ in self._overlaps(index, part):
                slot.shard.begin_to_read(within)

    @torch.no_grad()
    def read(self, index: int, target: torch.Tensor, part: slice = WHOLE) -> None:
        """Fill ``target`` with the values of ``part`` of sub-group ``index``. Both have the same length."""
        if not self.are_filed(index):
            super().read(index, target, part)
            return
        for slot, within, there in self._overlaps(index, part):
            slot.shard.read(target[there], within.start)

    @torch.no_grad()
    def write(self, index: int, master: torch.Tensor, part: slice = WHOLE) -> None:
        """Write the values of ``master`` to ``part`` of sub-group ``index``. On NVMe the write is only started."""
        if not self.are_filed(index):
            super().write(index, master, part)
            return
        for slot, within, there in self._overlaps(index, part):
            slot.shard.write(master[there], within.start)

    def _overlaps(self, index: int, part: slice) -> Iterator[tuple[_Slot, slice, slice]]:
        """Return the shards in a part of sub-group ``index``: the elements of each, and their position in the part."""
        begin, end, _ = part.indices(self._groups[index].layout.shard_numel)
        for slot in self._slots[index]:
            first, last = max(begin, slot.span.start), min(end, slot.span.stop)
            if first < last:
                yield slot, slice(first - slot.start, last - slot.start), slice(first - begin, last - begin)

    def begin_step(self) -> Sequence[tuple[int, slice]]:
        """Release every parameter, because its value is about to change.

        Returns:
            The parts of ``own`` that scripts have changed since the last call: the number of the sub-group, and
            the part.
        """
        self._residency.release_all()
        return self.changes()

    def changes(self) -> Sequence[tuple[int, slice]]:
        """Return the changes that ``begin_step`` returns, without releasing parameters."""
        changed = []
        for slot in (slot for slots in self._slots for slot in slots):
            if slot.shard.changed:
                slot.shard.changed = False
                changed.append((slot.group, slot.span))
        return changed

    def share(self) -> None:
        """Gather the persistent parameters. The next forward pass gathers the others."""
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
    """Return the shards concatenated in new memory; empty if one of them is on NVMe."""
    first = each.parameters[0]
    if any(slot.shard.pager is not None for slot in slots):
        return torch.empty(0, dtype=first.dtype)
    flat = slots[0].shard.place.zeros(each.layout.shard_numel, first)
    for slot in slots:
        slot.shard.move(flat[slot.span])
    return flat
