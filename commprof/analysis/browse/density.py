"""A histogram of time: the exact lengths of intervals in bins of equal width. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


def binned(
    begin: Numbers, end: Numbers, row: Numbers, rows: int, origin: int, width: int, bins: int
) -> Numbers:
    """Return how much of the intervals ``[begin, end)`` is in each bin.

    There are ``bins`` bins of ``width`` ns. The first bin begins at ``origin``.

    Args:
        row: The row of the result in which each interval counts. It is less than ``rows``.

    Returns:
        An array of ``rows`` x ``bins`` lengths in ns. Time outside of the bins is excluded. The sums are exact while a
        bin has less than 2**53 ns.
    """
    inside = (end > begin) & (end > origin) & (begin < origin + width * bins)
    start = np.maximum(begin[inside] - origin, 0)
    stop = np.minimum(end[inside] - origin, width * bins)
    cells = row[inside] * bins
    first, last = start // width, (stop - 1) // width
    busy_ns = _summed(cells + first, np.minimum(stop, (first + 1) * width) - start, rows * bins)
    wide = last > first
    if wide.any():
        cells, first, last = cells[wide], first[wide], last[wide]
        busy_ns += _summed(cells + last, stop[wide] - last * width, rows * bins)
        # An interval fills all bins between its first and its last bin. The width is added where these bins begin and
        # subtracted where they end, so that the cumulative sum contains the width in each of them.
        change = np.zeros(rows * bins, np.int64)
        np.add.at(change, cells + first + 1, width)
        np.subtract.at(change, cells + last, width)
        busy_ns += change.reshape(rows, bins).cumsum(axis=1).reshape(-1)
    return busy_ns.reshape(rows, bins)


def _summed(cells: Numbers, lengths: Numbers, count: int) -> Numbers:
    return np.bincount(cells, weights=lengths, minlength=count).astype(np.int64)


def folded(cells: Numbers, factor: int) -> Numbers:
    """Return ``cells`` with each ``factor`` neighboring bins summed.

    Args:
        cells: An array of rows x bins. The number of bins is a multiple of ``factor``.
    """
    rows, bins = cells.shape
    sums: Numbers = cells.reshape(rows, bins // factor, factor).sum(axis=2)
    return sums
