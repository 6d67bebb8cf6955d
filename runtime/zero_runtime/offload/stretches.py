"""Division of a rank's shards into stretches. Pure arithmetic.

A stretch is a chunk that the optimizer updates at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

# Stretches begin at multiples of this number of elements, so that kernels treat each element as in the complete shard.
GRAIN: Final = 64
_SMALLEST: Final = 2**18
_LARGEST: Final = 2**22
# The number of stretches, unless they become too small for a disk or too large for memory.
_SHARE: Final = 64


class Stretch(NamedTuple):
    """Consecutive elements of a shard that are updated together.

    Attributes:
        piece: The number of the shard.
        part: The range within the shard, in elements.
        offloaded: Whether the master and its state are offloaded.
    """

    piece: int
    part: slice
    offloaded: bool

    @property
    def numel(self) -> int:
        """The number of elements of the stretch."""
        return int(self.part.stop - self.part.start)


def whole(index: int, numel: int, offloaded: bool = False) -> Stretch:
    """Return a stretch that is a complete shard of ``numel`` elements."""
    return Stretch(index, slice(0, numel), offloaded)


def stretch_numel(total: int, largest: int) -> int:
    """Return the number of elements of a stretch.

    Args:
        total: The number of elements of all shards of the rank.
        largest: The largest number of elements that may be updated together.
    """
    wanted = min(max(total // _SHARE, _SMALLEST), _LARGEST, largest)
    return max(wanted // GRAIN, 1) * GRAIN


def cut(
    index: int, numel: int, limit: int, ratio: float = 1.0, starts: Sequence[int] | None = None
) -> Iterator[Stretch]:
    """Yield the stretches of a shard, in order.

    Args:
        index: The number of the shard.
        numel: The number of elements of the shard.
        limit: The number of elements of the largest offloaded stretch, a multiple of ``GRAIN``.
        ratio: The fraction of the shard, from its beginning, that is offloaded. The rest is one stretch.
        starts: The offsets at which a stretch may begin, in order. None allows all offsets. With ``starts``, a
            stretch may be longer than ``limit``.
    """
    end = _place(round(numel * ratio / GRAIN) * GRAIN, numel, starts)
    begin = 0
    while begin < end:
        stop = min(_place(begin + limit, numel, starts, after=begin), end)
        yield Stretch(index, slice(begin, stop), True)
        begin = stop
    if end < numel:
        yield Stretch(index, slice(end, numel), False)


def _place(wanted: int, numel: int, starts: Sequence[int] | None, after: int = -1) -> int:
    """Return the last offset up to ``wanted`` at which a stretch may begin.

    If this offset is not larger than ``after``, return the next offset at which a stretch may begin.
    """
    if wanted >= numel:
        return numel
    if starts is None:
        return wanted
    number = bisect_right(starts, wanted) - 1
    if starts[number] > after:
        return starts[number]
    return starts[number + 1] if number + 1 < len(starts) else numel
