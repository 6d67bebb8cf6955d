"""Parameters of which each rank keeps a slice (stage 3), as an optimizer over pieces needs them.

The slices of a sub-group move into one flat buffer, so that writing this rank's piece writes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_runtime.gradients import ParameterGroup
from zero_runtime.pieces import Pieces
from zero_runtime.sharding.residency import Residency
from zero_runtime.sharding.shards import Shard, shard_of


class ShardedParameters(Pieces):
    """Lays this rank's slices of each sub-group end to end.

    Args:
        groups: the sub-groups; their parameters have shards.
        residency: what gathers the parameters of the model.

    Attributes:
        own: for each sub-group, this rank's slices, padding included; 1-D.
    """

    def __init__(self, groups: Sequence[ParameterGroup], residency: Residency) -> None:
        self._residency = residency
        self._places: list[tuple[Shard, int, int]] = []  # sub-group and offset of each slice
        self.own: list[torch.Tensor] = []
        self.add(groups)

    def add(self, groups: Sequence[ParameterGroup]) -> None:
        """Take over the slices of further sub-groups."""
        for each in groups:
            self.own.append(self._flatten(len(self.own), each))

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
        for shard, index, start in self._places:
            if shard.changed:
                shard.changed = False
                changed.append((index, slice(start, start + shard.slice_numel)))
        return changed

    def share(self) -> None:
        """Gather the parameters that stay whole between steps; the next forward gathers the others."""
        self._residency.parameters_changed()

    def _flatten(self, index: int, each: ParameterGroup) -> torch.Tensor:
        first = each.parameters[0]
        flat = torch.zeros(each.layout.piece_numel, dtype=first.dtype, device=first.device)
        position = 0
        for parameter in each.parameters:
            shard = shard_of(parameter)
            assert shard is not None
            shard.move(flat.narrow(0, position, shard.slice_numel))
            shard.changed = False
            self._places.append((shard, index, position))
            position += shard.slice_numel
        return flat
