"""Find the pairs that all shortest edit scripts between two sequences have in common.

Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1 (1986): the cost follows the number
of differences, not the length. On one diagonal, the edit distance from the start never decreases, and the
edit distance to the end never increases. The furthest points of a search from either end therefore bound the
part of each diagonal that any shortest script uses.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int64]
Reached = list[list[int]]  # [differences][diagonal x - y, counted from the middle]: the largest x

ALONE: Final = -1  # the element has no partner in any shortest script
AMBIGUOUS: Final = -2  # shortest scripts disagree about the element
_BLOCK: Final = 4096


class Partners(NamedTuple):
    """For each element of either sequence: the position of its partner in the other, ALONE, or AMBIGUOUS."""

    first: Codes
    second: Codes


def furthest_points(a: Codes, b: Codes, most: int) -> tuple[Reached, int | None]:
    """Return how far each number of differences leads on each diagonal, and the edit distance.

    The edit distance is None if it is more than ``most``.
    """
    n, m = len(a), len(b)
    middle = most + 1
    furthest = [-1] * (2 * middle + 1)
    history: Reached = []
    for differences in range(most + 1):
        for k in range(-differences, differences + 1, 2):
            if differences == 0:
                x = 0
            else:
                x = max(furthest[middle + k - 1] + 1 if k > -differences else 0, furthest[middle + k + 1])
            x += common_prefix(a, b, x, x - k)
            furthest[middle + k] = x
        history.append(furthest.copy())
        end = middle + n - m
        if abs(n - m) <= differences and furthest[end] >= n:
            return history, differences
    return history, None


def common_prefix(a: Codes, b: Codes, x: int = 0, y: int = 0) -> int:
    """Return how many elements of ``a`` from index ``x`` equal the elements of ``b`` from index ``y``."""
    length = min(len(a) - x, len(b) - y)
    if length <= 0 or a[x] != b[y]:
        return 0
    done, size = 0, 16
    while done < length:
        size = min(size * 4, _BLOCK, length - done)
        unequal = a[x + done : x + done + size] != b[y + done : y + done + size]
        position = int(unequal.argmax())
        if unequal[position]:
            return done + position
        done += size
    return length


def common_suffix(a: Codes, b: Codes) -> int:
    """Return how many elements at the end of ``a`` and ``b`` are equal."""
    return common_prefix(a[::-1], b[::-1])


def certain_partners(a: Codes, b: Codes, most: int) -> Partners | None:
    """Return the pairs that are in every longest common subsequence.

    The result is None if more than ``most`` elements have no partner.
    """
    if abs(len(a) - len(b)) > most:
        return None
    forward, distance = furthest_points(a, b, most)
    if distance is None:
        return None
    backward, _ = furthest_points(a[::-1], b[::-1], distance)
    return _Scripts(a, b, forward, backward, distance, most).partners()


class _Scripts:
    """Counts, for each element, the ways in which shortest scripts use the element."""

    def __init__(
        self, a: Codes, b: Codes, forward: Reached, backward: Reached, distance: int, most: int
    ) -> None:
        self._a, self._b = a, b
        self._forward, self._backward = forward, backward
        self._distance = distance
        self._middles = most + 1, distance + 1
        n, m = len(a), len(b)
        self._partner = np.full(n, ALONE, np.int64)
        self._matches = np.zeros(n, np.int64), np.zeros(m, np.int64)
        self._skips = np.zeros(n + 1, np.int64), np.zeros(m + 1, np.int64)  # differences of the counts

    def partners(self) -> Partners:
        # A script that uses a diagonal costs at least the distances of this diagonal from the diagonals of the start
        # and of the end.
        across = len(self._a) - len(self._b)
        spare = (self._distance - abs(across)) // 2
        for k in range(min(0, across) - spare, max(0, across) + spare + 1):
            for differences in range(abs(k), self._distance - abs(across - k) + 1, 2):
                self._count_matches(k, differences)
                self._count_skips(k, differences)
        first = _verdicts(self._matches[0], self._skips[0])
        second = _verdicts(self._matches[1], self._skips[1])
        sure = np.flatnonzero(first >= 0)
        first[sure] = self._partner[sure]
        second[self._partner[sure]] = sure
        return Partners(first, second)

    def _from_start(self, k: int, differences: int) -> tuple[int, int]:
        """Return [begin, end) of diagonal ``k`` where the distance from the start is exactly ``differences``."""
        if differences < abs(k):
            return 0, 0
        reached = self._forward[differences][self._middles[0] + k]
        begin = max(k, 0)
        if differences - 2 >= abs(k):
            begin = max(begin, self._forward[differences - 2][self._middles[0] + k] + 1)
        return begin, min(reached, len(self._a), len(self._b) + k) + 1

    def _from_end(self, k: int, differences: int) -> tuple[int, int]:
        """Return [begin, end) of diagonal ``k`` where the distance to the end is exactly ``differences``."""
        n, m = len(self._a), len(self._b)
        mirrored = n - m - k
        if differences < abs(mirrored):
            return 0, 0
        column = self._middles[1] + mirrored
        begin = max(n - self._backward[differences][column], k, 0)
        end = min(n, m + k) + 1
        if differences - 2 >= abs(mirrored):
            end = min(end, n - self._backward[differences - 2][column])
        return begin, end

    def _count_matches(self, k: int, differences: int) -> None:
        left = self._from_start(k, differences)
        right = self._from_end(k, self._distance - differences)
        begin, end = max(left[0], right[0] - 1), min(left[1], right[1] - 1)
        if begin >= end:
            return
        equal = self._a[begin:end] == self._b[begin - k : end - k]
        self._matches[0][begin:end] += equal
        self._matches[1][begin - k : end - k] += equal
        places = np.flatnonzero(equal) + begin
        self._partner[places] = places - k

    def _count_skips(self, k: int, differences: int) -> None:
        rest = self._distance - differences - 1
        if rest < 0:
            return
        left = self._from_start(k, differences)
        right = self._from_end(k + 1, rest)
        begin, end = max(left[0], right[0] - 1), min(left[1], right[1] - 1)
        if begin < end:
            self._skips[0][begin] += 1
            self._skips[0][end] -= 1
        right = self._from_end(k - 1, rest)
        begin, end = max(left[0], right[0]) - k, min(left[1], right[1]) - k
        if begin < end:
            self._skips[1][begin] += 1
            self._skips[1][end] -= 1


def _verdicts(matches: Codes, skip_changes: Codes) -> Codes:
    """Return 0 for an element that every script pairs with the same partner, and otherwise ALONE or AMBIGUOUS."""
    skips = np.cumsum(skip_changes)[:-1]
    verdicts = np.full(len(matches), AMBIGUOUS, np.int64)
    verdicts[matches == 0] = ALONE
    verdicts[(matches == 1) & (skips == 0)] = 0
    return verdicts
