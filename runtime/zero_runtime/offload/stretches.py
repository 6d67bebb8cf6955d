"""Division of a rank's shards into stretches: chunks that the optimizer updates one after another. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

# Stretches begin at multiples of this many elements: kernels then treat each element as in the complete shard.
GRAIN: Final = 64
_SMALLEST: Final = 2**18
_LARGEST: Final = 2**22
_SHARE: Final = 64  # number of stretches, unless they become too small for a disk or too large for memory


class Stretch(NamedTuple):
    """Consecutive elements of a shard that are updated together.

    Attributes:
        piece: number of the shard.
        part: range within the shard, in elements.
        offloaded: whether master and state are offloaded.
    """

    piece: int
    part: slice
    offloaded: bool

    @property
    def numel(self) -> int:
        """Elements of the stretch."""
        return int(self.part.stop - self.part.start)


def whole(index: int, numel: int, offloaded: bool = False) -> Stretch:
    """The stretch that is a complete shard of ``numel`` elements."""
    return Stretch(index, slice(0, numel), offloaded)


def stretch_numel(total: int, largest: int) -> int:
    """Elements of a stretch if a rank has ``total`` elements and may update at most ``largest`` together."""
    wanted = min(max(total // _SHARE, _SMALLEST), _LARGEST, largest)
    return max(wanted // GRAIN, 1) * GRAIN


def cut(
    index: int, numel: int, limit: int, ratio: float = 1.0, starts: Sequence[int] | None = None
) -> Iterator[Stretch]:
    """The stretches of a shard, in order.

    Args:
        index: number of the shard.
        numel: elements of the shard.
        limit: elements of the largest stretch that is offloaded; a multiple of ``GRAIN``.
        ratio: fraction of the shard, from its beginning, that is offloaded; the rest is one stretch.
        starts: offsets at which a stretch may begin, in order; None for all. With them a stretch may be longer.
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
    """The last offset up to ``wanted`` at which a stretch may begin; if it is not beyond ``after``, the next one."""
    if wanted >= numel:
        return numel
    if starts is None:
        return wanted
    number = bisect_right(starts, wanted) - 1
    if starts[number] > after:
        return starts[number]
    return starts[number + 1] if number + 1 < len(starts) else numel
