"""Store values by rank in a file, because they are too many for memory, and compute their quantiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from tempfile import TemporaryFile

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class RankValues:
    """A temporary file of several values for each of many rows, ordered by rank. Must be closed.

    Args:
        names: The names of the values.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._file = TemporaryFile(prefix="commprof-", buffering=0)  # noqa: SIM115 - close() gives it back
        self._end = 0
        # For each rank and kind of rows: the position of the first value, the number of values, and the distance
        # between the values of two names.
        self._places: dict[tuple[int, bool], list[tuple[int, int, int]]] = {}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def add(self, kind: bool, ranks: Sequence[int], counts: Sequence[int], values: Sequence[Numbers]) -> None:
        """Add rows of one kind.

        Args:
            counts: The number of rows of each of ``ranks``.
            values: The values of each name, in the order of ``ranks``.
        """
        for each in values:
            self._file.write(np.ascontiguousarray(each, np.int64).tobytes())
        begin, rows = self._end, sum(counts)
        for rank, count in zip(ranks, counts, strict=True):
            self._places.setdefault((rank, kind), []).append((begin, count, rows))
            begin += count
        self._end += len(self._names) * rows

    def of(self, rank: int, name: str, kinds: Sequence[bool] = (True, False)) -> Numbers:
        """Return the values ``name`` of a rank in rows of the given kinds, in any order."""
        column = self._names.index(name)
        places = [place for kind in kinds for place in self._places.get((rank, kind), ())]
        values = [np.empty(0, np.int64)]
        for begin, count, apart in places:
            self._file.seek(8 * (begin + column * apart))
            values.append(np.fromfile(self._file, np.int64, count))
        return np.concatenate(values)


def quantile(ordered: Numbers, share: float) -> float:
    """Return the quantile ``share`` of ``ordered``, interpolated linearly.

    Args:
        ordered: At least one value, in ascending order.
    """
    place = (len(ordered) - 1) * share
    low, high = (float(ordered[each]) for each in (math.floor(place), math.ceil(place)))
    return low + (high - low) * (place - math.floor(place))
