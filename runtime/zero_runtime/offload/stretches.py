"""Cutting pieces of parameters into stretches, which are updated one after the other. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

# Stretches begin at multiples of this many elements: kernels then treat each element as they would in the whole piece.
GRAIN: Final = 64
_SMALLEST: Final = 2**18
_LARGEST: Final = 2**22
_SHARE: Final = 64  # so many stretches, where they are neither too small for a disk nor too large for memory


class Stretch(NamedTuple):
    """Consecutive elements of a piece that are updated together.

    Attributes:
        piece: its number.
        part: of the piece, in elements.
        offloaded: whether master and state are kept elsewhere than on the device.
    """

    piece: int
    part: slice
    offloaded: bool

    @property
    def numel(self) -> int:
        """Elements of the stretch."""
        return int(self.part.stop - self.part.start)


def whole(index: int, numel: int, offloaded: bool = False) -> Stretch:
    """The stretch that is all of a piece of ``numel`` elements."""
    return Stretch(index, slice(0, numel), offloaded)


def stretch_numel(total: int, largest: int) -> int:
    """Elements of a stretch, where a rank has ``total`` and at most ``largest`` are to be updated together."""
    wanted = min(max(total // _SHARE, _SMALLEST), _LARGEST, largest)
    return max(wanted // GRAIN, 1) * GRAIN


def cut(
    index: int, numel: int, limit: int, ratio: float = 1.0, starts: Sequence[int] | None = None
) -> Iterator[Stretch]:
    """The stretches of a piece, in order.

    Args:
        index: of the piece.
        numel: elements of the piece.
        limit: elements of the largest stretch that is offloaded; a multiple of ``GRAIN``.
        ratio: share of the piece, from its beginning, that is offloaded; the rest is one stretch.
        starts: where a stretch may begin, in order, where that is not everywhere; a stretch may then be longer.
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
    """The last place up to ``wanted`` at which a stretch may begin; beyond ``after``, the first one that there is."""
    if wanted >= numel:
        return numel
    if starts is None:
        return wanted
    number = bisect_right(starts, wanted) - 1
    if starts[number] > after:
        return starts[number]
    return starts[number + 1] if number + 1 < len(starts) else numel
