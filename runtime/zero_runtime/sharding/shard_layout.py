"""The partition of the parameters into shards at ZeRO stage 3. Pure arithmetic.

Each parameter is partitioned separately. Rank r owns its elements [r k, (r + 1) k), with k = ceil(numel /
world_size). Elements past the end of the parameter are padding, so the last ranks may own fewer than k real
elements, or none. The optimizer works on sub-groups. A sub-group concatenates a rank's shards of some
parameters of one param group, including padding::

    parameters   |    p0    | p1 |     p2      |
    shards       |r0 |r1 |r2|0|12|r0  |r1  |r2.|      each dot is an element of padding
    rank 0's     |p0 |p1|p2  |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from zero_runtime.gradient_reduction.flat_layout import ShardRange
from zero_runtime.sharding.shards import slice_numel


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One sub-group. Counts and offsets are elements.

    Attributes:
        numels: The sizes of the parameters, in the order of the param group.
        offsets: The first element of each parameter's shard in a rank's part of the sub-group.
        shard_numel: The number of elements that each rank owns, including padding.
        world_size: The number of shards of each parameter.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    world_size: int

    @property
    def order(self) -> tuple[int, ...]:
        """The positions of the parameters within the sub-group, in memory order."""
        return tuple(range(len(self.numels)))

    def shards(self, index: int) -> tuple[ShardRange, ...]:
        """Return the shards of parameter ``index``, in element order, without padding; empty for an empty parameter."""
        numel = self.numels[index]
        width = slice_numel(numel, self.world_size)
        return tuple(
            ShardRange(owner, start, min(width, numel - start), self.offsets[index])
            for owner, start in enumerate(range(0, numel, width or 1))
        )


def shard_layout(numels: Sequence[int], world_size: int) -> ShardLayout:
    """Return the layout of one sub-group whose parameters have the sizes ``numels``."""
    ends = tuple(accumulate((slice_numel(numel, world_size) for numel in numels), initial=0))
    return ShardLayout(tuple(numels), ends[:-1], ends[-1], world_size)


def sub_groups(numels: Sequence[int], world_size: int, limit: int) -> list[range]:
    """Return the sub-groups of a param group, as ranges of positions of their parameters.

    A sub-group ends as soon as a rank's shards of the sub-group have ``limit`` (``sub_group_size``) elements.
    This is DeepSpeed 0.19.8's rule.

    >>> sub_groups([8, 4, 6, 2], 2, 5)
    [range(0, 2), range(2, 4)]
    """
    groups, first, group_numel = [], 0, 0
    for index, numel in enumerate(numels):
        group_numel += slice_numel(numel, world_size)
        if group_numel >= limit:
            groups.append(range(first, index + 1))
            first, group_numel = index + 1, 0
    if first < len(numels):
        groups.append(range(first, len(numels)))
    return groups
