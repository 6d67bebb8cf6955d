"""Pair the elements of two sequences from which some elements are missing.

The result contains certain pairs, ambiguous elements, and elements without a partner. A pair is certain if it
is in every longest common subsequence (``edits``). An element with several equally good partners is
ambiguous. The sequences are divided at elements that occur exactly once on both sides, and at runs of certain
pairs. Time and memory are therefore linear in the length, not quadratic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from commprof.align.sequences.edits import (
    ALONE,
    AMBIGUOUS,
    Codes,
    Partners,
    certain_partners,
    common_prefix,
    common_suffix,
    furthest_points,
)

UNSEARCHED: Final = -3  # there are too many differences here for a search

# The most elements without a partner in one search. A sequence with more is searched in chunks.
SEARCHED_DIFFERENCES: Final = 64
# A chunk ends within a run of this many certain pairs.
_STRETCH: Final = 16
# The most chunks of one alignment. The rest of the sequences differs too much to be matched.
_MOST_CHUNKS: Final = 400


def find_partners(first: Codes, second: Codes) -> Partners:
    """Return for each element its certain partner, or ALONE, AMBIGUOUS or UNSEARCHED."""
    a_places = np.flatnonzero(_holds(second, first))
    b_places = np.flatnonzero(_holds(first, second))
    partners = Partners(np.full(len(first), ALONE, np.int64), np.full(len(second), ALONE, np.int64))
    a, b = first[a_places], second[b_places]
    cuts_left = _MOST_CHUNKS
    if np.array_equal(a, b):
        partners.first[a_places], partners.second[b_places] = b_places, a_places
        return partners
    for x0, x1, y0, y1 in _between_anchors(a, b):
        piece, cuts_left = _search(a[x0:x1], b[y0:y1], cuts_left)
        _put(partners.first, piece.first, a_places[x0:x1], b_places[y0:y1])
        _put(partners.second, piece.second, b_places[y0:y1], a_places[x0:x1])
    return partners


def _holds(values: Codes, elements: Codes) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether each of ``elements`` is in ``values``."""
    return np.asarray(np.isin(elements, np.unique(values)))


def _put(target: Codes, piece: Codes, places: Codes, partners: Codes) -> None:
    """Write the verdicts of one chunk to the positions of its elements in the full sequence."""
    paired = piece >= 0
    target[places[~paired]] = piece[~paired]
    target[places[paired]] = partners[piece[paired]]


def _between_anchors(a: Codes, b: Codes) -> Iterator[tuple[int, int, int, int]]:
    """Yield the chunks between anchors, including the anchors: ``a[x0:x1]`` belongs to ``b[y0:y1]``.

    An anchor is an element that occurs exactly once in either sequence and that no other such element
    crosses.
    """
    xs, ys = _anchors(a, b)
    # Adjacent anchors need no search, so only gaps start a new chunk.
    gaps = np.flatnonzero((np.diff(xs) > 1) | (np.diff(ys) > 1))
    x0 = y0 = 0
    for gap in gaps:
        x1, y1 = int(xs[gap]) + 1, int(ys[gap]) + 1
        yield x0, x1, y0, y1
        x0, y0 = x1, y1
    yield x0, len(a), y0, len(b)


def _anchors(a: Codes, b: Codes) -> tuple[Codes, Codes]:
    """Return the positions of the anchors in either sequence, ascending in both."""
    a_values, a_first, a_counts = np.unique(a, return_index=True, return_counts=True)
    b_values, b_first, b_counts = np.unique(b, return_index=True, return_counts=True)
    once, in_a, in_b = np.intersect1d(
        a_values[a_counts == 1], b_values[b_counts == 1], assume_unique=True, return_indices=True
    )
    if not len(once):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    xs, ys = a_first[a_counts == 1][in_a], b_first[b_counts == 1][in_b]
    order = np.argsort(xs)
    xs, ys = xs[order], ys[order]
    highest = np.maximum.accumulate(ys)
    lowest = np.minimum.accumulate(ys[::-1])[::-1]
    straight = (ys == highest) & (ys == lowest)
    return xs[straight], ys[straight]


def _search(a: Codes, b: Codes, cuts_left: int) -> tuple[Partners, int]:
    """Return the verdicts for one chunk, and how many cuts are left.

    A chunk that has too many differences is divided further.
    """
    if len(a) == len(b) and np.array_equal(a, b):
        return Partners(np.arange(len(a)), np.arange(len(b))), cuts_left
    result = Partners(np.full(len(a), UNSEARCHED, np.int64), np.full(len(b), UNSEARCHED, np.int64))
    x = y = 0
    while cuts_left > 0 and (x < len(a) or y < len(b)):
        part = certain_partners(a[x:], b[y:], SEARCHED_DIFFERENCES) or one_gap(a[x:], b[y:])
        width, height = len(a) - x, len(b) - y
        if part is None:
            cuts_left -= 1
            width, height = _cut(a[x:], b[y:])
            part = certain_partners(a[x : x + width], b[y : y + height], SEARCHED_DIFFERENCES)
            if part is None:  # not expected: the cut is on a path with fewer differences
                break
            end = _last_certain(part)
            if end is None:
                x, y = x + width, y + height
                continue
            width, height = end
        paired = part.first[:width] >= 0
        result.first[x : x + width] = np.where(paired, part.first[:width] + y, part.first[:width])
        paired = part.second[:height] >= 0
        result.second[y : y + height] = np.where(paired, part.second[:height] + x, part.second[:height])
        x, y = x + width, y + height
    return result, cuts_left


def one_gap(a: Codes, b: Codes) -> Partners | None:
    """Return the verdicts if one sequence is the other sequence without one block, or None if it is not.

    The position of the block is not unique within a range that repeats with the length of the block. Elements
    that the block may cover are ambiguous.
    """
    if len(a) < len(b):
        mirrored = one_gap(b, a)
        return None if mirrored is None else Partners(mirrored.second, mirrored.first)
    n, m = len(a), len(b)
    latest = common_prefix(a, b)
    earliest = m - common_suffix(a, b)
    if earliest > latest:
        return None
    first = np.full(n, AMBIGUOUS, np.int64)
    second = np.full(m, AMBIGUOUS, np.int64)
    first[:earliest] = second[:earliest] = np.arange(earliest)
    first[latest : earliest + n - m] = ALONE
    first[latest + n - m :] = np.arange(latest, m)
    second[latest:] = np.arange(latest + n - m, n)
    return Partners(first, second)


def _cut(a: Codes, b: Codes) -> tuple[int, int]:
    """Return where to end a chunk that has too many differences: at half of the differences."""
    history, _ = furthest_points(a, b, SEARCHED_DIFFERENCES)
    middle = SEARCHED_DIFFERENCES + 1
    half = SEARCHED_DIFFERENCES // 2
    points = [
        (2 * history[half][middle + k] - k, history[half][middle + k], k) for k in range(-half, half + 1, 2)
    ]
    _, x, k = max(point for point in points if point[1] <= len(a) and point[1] - point[2] <= len(b))
    return x, x - k


def _last_certain(part: Partners) -> tuple[int, int] | None:
    """Return where the next chunk begins, within the last long run of certain pairs, or None if there is none."""
    paired = part.first >= 0
    straight = np.concatenate(([0], np.cumsum(paired)))
    full = np.flatnonzero(straight[_STRETCH:] - straight[:-_STRETCH] == _STRETCH)
    if not len(full):
        return None
    x = int(full[-1]) + _STRETCH // 2
    return x, int(part.first[x])
