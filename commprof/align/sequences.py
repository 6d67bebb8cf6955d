"""Which elements of two sequences belong together when some are missing from either: a longest common subsequence.

Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1 (1986): the cost follows the number of
differences, not the length, so a hundred thousand operations with a handful of lost lines take milliseconds. Where the
sequences differ much, the search goes on from a good partial solution, and stays linear in the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Pair = tuple[int, int]
Codes = NDArray[np.int64]

# Differences that one search explores, and how many of them are kept when it has to stop there: its last steps
# are the ones that a longer search would revise.
SEARCHED_DIFFERENCES: Final = 400
KEPT_DIFFERENCES: Final = 300
_BLOCK: Final = 4096


def common_pairs(first: Sequence[int], second: Sequence[int]) -> list[Pair]:
    """Positions of equal elements, increasing in both sequences, as many as possible.

    Elements that the other sequence does not have at all are set aside first; they can have no partner.
    """
    a, b = np.asarray(first, np.int64), np.asarray(second, np.int64)
    a_places, b_places = np.flatnonzero(np.isin(a, b)), np.flatnonzero(np.isin(b, a))
    pairs = _align(a[a_places], b[b_places])
    return [(int(a_places[x]), int(b_places[y])) for x, y in pairs]


def _align(a: Codes, b: Codes) -> list[Pair]:
    pairs: list[Pair] = []
    x = y = 0
    while x < len(a) and y < len(b):
        steps, x, y = _search(a, b, x, y)
        pairs.extend(steps)
    return pairs


def _search(a: Codes, b: Codes, x0: int, y0: int) -> tuple[list[Pair], int, int]:
    """Pairs from ``(x0, y0)`` on, and where the next search begins."""
    a, b = a[x0:], b[y0:]
    n, m = len(a), len(b)
    middle = SEARCHED_DIFFERENCES + 1
    furthest = [0] * (2 * middle + 1)  # by diagonal x - y + middle: the largest x that is reached
    history: list[list[int]] = []
    for differences in range(SEARCHED_DIFFERENCES + 1):
        history.append(furthest.copy())
        for k in range(-differences, differences + 1, 2):
            if k == -differences or (
                k != differences and furthest[middle + k - 1] < furthest[middle + k + 1]
            ):
                x = furthest[middle + k + 1]
            else:
                x = furthest[middle + k - 1] + 1
            x += _common_prefix(a, b, x, x - k)
            furthest[middle + k] = x
            if x >= n and x - k >= m:
                pairs = _path(history, differences, k, x, middle)
                return [(x0 + i, y0 + j) for i, j in pairs], x0 + n, y0 + m
    return _partial(history, furthest, (n, m), (x0, y0), middle)


def _partial(
    history: list[list[int]], furthest: list[int], ends: Pair, begins: Pair, middle: int
) -> tuple[list[Pair], int, int]:
    """What a search that ran out of differences keeps: the front of the path that came furthest."""
    reached = [
        (2 * furthest[middle + k] - k, k)
        for k in range(-SEARCHED_DIFFERENCES, SEARCHED_DIFFERENCES + 1, 2)
        if furthest[middle + k] <= ends[0] and furthest[middle + k] - k <= ends[1]
    ]
    _, k = max(reached)
    x = furthest[middle + k]
    differences = SEARCHED_DIFFERENCES
    while differences > KEPT_DIFFERENCES:
        k, x = _came_from(history[differences], differences, k, middle)
        differences -= 1
    pairs = _path(history, differences, k, x, middle)
    return [(begins[0] + i, begins[1] + j) for i, j in pairs], begins[0] + x, begins[1] + x - k


def _came_from(before: list[int], differences: int, k: int, middle: int) -> tuple[int, int]:
    """The diagonal, and the x on it, from which the path entered diagonal ``k``."""
    if k == -differences or (k != differences and before[middle + k - 1] < before[middle + k + 1]):
        return k + 1, before[middle + k + 1]
    return k - 1, before[middle + k - 1]


def _path(history: list[list[int]], differences: int, k: int, x: int, middle: int) -> list[Pair]:
    """The equal elements on the path that ends at ``x`` on diagonal ``k`` after so many differences."""
    pairs: list[Pair] = []
    for d in range(differences, 0, -1):
        came_k, came_x = _came_from(history[d], d, k, middle)
        entered = came_x if came_k > k else came_x + 1
        pairs.extend((i, i - k) for i in range(x - 1, entered - 1, -1))
        k, x = came_k, came_x
    pairs.extend((i, i) for i in range(x - 1, -1, -1))
    pairs.reverse()
    return pairs


def _common_prefix(a: Codes, b: Codes, x: int, y: int) -> int:
    """How many elements of ``a`` from ``x`` on equal those of ``b`` from ``y`` on."""
    length = min(len(a) - x, len(b) - y)
    if length <= 0 or y < 0 or a[x] != b[y]:
        return 0
    done = 0
    while done < length:
        size = min(_BLOCK, length - done)
        unequal = a[x + done : x + done + size] != b[y + done : y + done + size]
        position = int(unequal.argmax())
        if unequal[position]:
            return done + position
        done += size
    return length
