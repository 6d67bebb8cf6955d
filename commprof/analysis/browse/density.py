"""Histogram of time: exact lengths of intervals in equal bins. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


def binned(
    begin: Numbers, end: Numbers, row: Numbers, rows: int, origin: int, width: int, bins: int
) -> Numbers:
    """The lengths of the intervals ``[begin, end)`` within each of ``bins`` bins of ``width``, from ``origin`` on.

    Args:
        row: which row of the answer an interval counts in, below ``rows``.

    Returns:
        ``rows`` x ``bins`` nanoseconds. Time outside of the bins is left out; the rest adds up exactly while a bin
        has less than 2**53 ns.
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
        # Bins between the first and the last one of an interval are full: add the width at the start, subtract it at the
        # end.
        change = np.zeros(rows * bins, np.int64)
        np.add.at(change, cells + first + 1, width)
        np.subtract.at(change, cells + last, width)
        busy_ns += change.reshape(rows, bins).cumsum(axis=1).reshape(-1)
    return busy_ns.reshape(rows, bins)


def _summed(cells: Numbers, lengths: Numbers, count: int) -> Numbers:
    return np.bincount(cells, weights=lengths, minlength=count).astype(np.int64)


def folded(cells: Numbers, factor: int) -> Numbers:
    """``cells`` (rows x bins, the bins a multiple of ``factor``) with each ``factor`` neighbours summed."""
    rows, bins = cells.shape
    sums: Numbers = cells.reshape(rows, bins // factor, factor).sum(axis=2)
    return sums
