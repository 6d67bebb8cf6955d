"""Counts repeated numbers. Small numbers are counted without sorting, which is faster."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]

# Up to this ratio of the largest key to the number of keys, counting is faster than sorting.
_DENSE: Final = 16


def numbered(codes: Positions) -> tuple[list[int], Positions]:
    """Return the distinct numbers in ``codes``, and for each code its position in this list."""
    occurs = np.bincount(codes) > 0
    return np.flatnonzero(occurs).tolist(), (np.cumsum(occurs) - 1)[codes]


def first_of_each(keys: Positions) -> tuple[Positions, Positions, Positions]:
    """Return the distinct keys, the first position of each key, and the number of times each key occurs."""
    if not len(keys) or int(keys.max()) > _DENSE * len(keys):
        return np.unique(keys, return_index=True, return_counts=True)
    times = np.bincount(keys)
    first = np.empty(len(times), np.int64)
    first[keys[::-1]] = np.arange(len(keys))[::-1]
    distinct = np.flatnonzero(times)
    return distinct, first[distinct], times[distinct]
