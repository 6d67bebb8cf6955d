"""Who owns which slice of the parameters at ZeRO stage 3. Pure arithmetic.

Each parameter is cut by itself: rank r owns elements [r k, (r + 1) k) of it, with k = ceil(numel / world_size). What
lies past its end is padding, so the last ranks may own less than k real elements, or none. The optimizer works on
sub-groups: a rank's slices of some parameters of one param group, padding included, end to end::

    parameters   |    p0    | p1 |     p2      |
    slices       |r0 |r1 |r2|0|12|r0  |r1  |r2.|      each dot is an element of padding
    rank 0's     |p0 |p1|p2  |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from zero_runtime.gradient_reduction.layout import ShardRange
from zero_runtime.sharding.shards import slice_numel


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One sub-group. Counts and offsets are elements.

    Attributes:
        numels: sizes of the parameters, in the order of the param group.
        offsets: where each parameter's slice begins in a rank's piece.
        shard_numel: elements that each rank owns, padding included.
        world_size: number of slices of each parameter.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    world_size: int

    @property
    def order(self) -> tuple[int, ...]:
        """Positions of the parameters within the sub-group, in the order of the piece."""
        return tuple(range(len(self.numels)))

    def shards(self, index: int) -> tuple[ShardRange, ...]:
        """The slices of parameter number ``index``, in element order, without padding; none for an empty one."""
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
    """Which parameters of a param group are optimised together, as ranges of their positions.

    A sub-group ends once a rank's slices of it have ``limit`` (``sub_group_size``) elements: DeepSpeed 0.19.8's rule.

    >>> sub_groups([8, 4, 6, 2], 2, 5)
    [range(0, 2), range(2, 4)]
    """
    groups, first, held = [], 0, 0
    for index, numel in enumerate(numels):
        held += slice_numel(numel, world_size)
        if held >= limit:
            groups.append(range(first, index + 1))
            first, held = index + 1, 0
    if first < len(numels):
        groups.append(range(first, len(numels)))
    return groups
