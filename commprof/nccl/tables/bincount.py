"""Counts repeated numbers, without sorting where they are small."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]

_DENSE: Final = 16  # as many numbers for each key are counted faster than keys are sorted


def numbered(codes: Positions) -> tuple[list[int], Positions]:
    """The numbers that occur in ``codes``, and for each code its position among them."""
    occurs = np.bincount(codes) > 0
    return np.flatnonzero(occurs).tolist(), (np.cumsum(occurs) - 1)[codes]


def first_of_each(keys: Positions) -> tuple[Positions, Positions, Positions]:
    """The distinct keys, the first position of each, and how often it occurs."""
    if not len(keys) or int(keys.max()) > _DENSE * len(keys):
        return np.unique(keys, return_index=True, return_counts=True)
    times = np.bincount(keys)
    first = np.empty(len(times), np.int64)
    first[keys[::-1]] = np.arange(len(keys))[::-1]
    distinct = np.flatnonzero(times)
    return distinct, first[distinct], times[distinct]
