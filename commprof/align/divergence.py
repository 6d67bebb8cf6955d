"""The first place where the records of a rank and the lines of a log differ, with its surroundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from commprof.align.sequences.edits import AMBIGUOUS, Codes, Partners

BEFORE = 3
SHOWN = 9


class Side(NamedTuple):
    """A record and its line, one of which may be absent.

    ``state`` is one of the states of table ``matches``.
    """

    state: str
    record: str | None
    line: str | None


class Divergence(NamedTuple):
    """The first place where the records of a rank in one group and its lines differ.

    Attributes:
        rank, pg, group_ranks: The rank and group of the records.
        comm, host, pid: The communicator and process of the lines. None if no communicator serves the group.
        matched_before: The number of pairs before this place.
        sides: The records and lines around this place, in order.
    """

    rank: int
    pg: str
    group_ranks: str
    comm: str | None
    host: str | None
    pid: int | None
    matched_before: int
    sides: tuple[Side, ...]


def first_difference(partners: Partners) -> tuple[int, int] | None:
    """Return the position in either sequence of the first element without a certain partner.

    The result is None if all elements have a partner.
    """
    xs = np.flatnonzero(partners.first < 0)
    ys = np.flatnonzero(partners.second < 0)
    if not len(xs) and not len(ys):
        return None
    # All elements before these positions are paired in order, so both positions count the same pairs.
    first = min(
        int(xs[0]) if len(xs) else len(partners.first), int(ys[0]) if len(ys) else len(partners.second)
    )
    return first, first


def surroundings(
    partners: Partners, place: tuple[int, int], record: Callable[[int], str], line: Callable[[int], str]
) -> tuple[Side, ...]:
    """Return the records and lines around ``place``.

    Args:
        record, line: Functions that describe an element of the first and of the second sequence.
    """
    x, y = (max(position - BEFORE, 0) for position in place)
    sides: list[Side] = []
    first, second = partners
    while len(sides) < SHOWN and (x < len(first) or y < len(second)):
        if x < len(first) and y < len(second) and first[x] == y:
            sides.append(Side("matched", record(x), line(y)))
            x, y = x + 1, y + 1
        elif x < len(first) and first[x] < 0:
            sides.append(Side(_state(first, x, "missing"), record(x), None))
            x += 1
        else:
            sides.append(Side(_state(second, y, "extra"), None, line(y)))
            y += 1
    return tuple(sides)


def _state(verdicts: Codes, place: int, alone: str) -> str:
    return "ambiguous" if verdicts[place] <= AMBIGUOUS else alone
