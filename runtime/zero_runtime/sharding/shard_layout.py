"""The partition of the parameters into shards at ZeRO stage 3. Pure arithmetic.

Each parameter is partitioned separately: rank r owns elements [r k, (r + 1) k) of it, with k = ceil(numel / world_size).
Elements past its end are padding, so the last ranks may own fewer than k real elements, or none. The optimizer works on
sub-groups: the concatenated shards of a rank of some parameters of one param group, padding included::

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
        numels: sizes of the parameters, in the order of the param group.
        offsets: first element of each parameter's shard in a rank's part of the sub-group.
        shard_numel: elements that each rank owns, padding included.
        world_size: number of shards of each parameter.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    world_size: int

    @property
    def order(self) -> tuple[int, ...]:
        """Positions of the parameters within the sub-group, in memory order."""
        return tuple(range(len(self.numels)))

    def shards(self, index: int) -> tuple[ShardRange, ...]:
        """The shards of parameter number ``index``, in element order, without padding; none for an empty one."""
        numel = self.numels[index]
        width = slice_numel(numel, self.world_size)
        return tuple(
            ShardRange(owner, start, min(width, numel - start), self.offsets[index])
            for owner, start in enumerate(range(0, numel, width or 1))
        )


def shard_layout(numels: Sequence[int], world_size: int) -> ShardLayout:
    """The layout of one sub-group whose parameters have the sizes ``numels``."""
    ends = tuple(accumulate((slice_numel(numel, world_size) for numel in numels), initial=0))
    return ShardLayout(tuple(numels), ends[:-1], ends[-1], world_size)


def sub_groups(numels: Sequence[int], world_size: int, limit: int) -> list[range]:
    """The sub-groups of a param group, as ranges of positions of their parameters.

    A sub-group ends once a rank's shards of it have ``limit`` (``sub_group_size``) elements: DeepSpeed 0.19.8's rule.

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
