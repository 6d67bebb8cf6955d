"""Which ranks reduce gradient buckets together, so that buckets of one number in several groups are told apart. Pure.

Stages of a pipeline and slices of tensors number their buckets alike, and reduce them in groups of their own. A bucket that
is reduced along several axes one after the other is one bucket of all their ranks: groups that share a rank are joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commprof.schema import format_ranks, parse_ranks

Numbers = npt.NDArray[np.int64]

UNKNOWN: Final = -1  # of a rank none of whose records carries the number of a bucket


class BucketGroups(NamedTuple):
    """Sets of ranks, each with a number.

    Attributes:
        texts: the ranks of each, as in the schema's ``group_ranks``; the lowest ranks first.
        members: the number of each attempt and rank.
    """

    texts: tuple[str, ...]
    members: Mapping[tuple[int, int], int]

    def numbers(self, attempts: Numbers, ranks: Numbers) -> Numbers:
        """The number of each attempt and rank; :data:`UNKNOWN` of those that are in none."""
        found = np.full(len(ranks), UNKNOWN, np.int64)
        if not self.members or not len(ranks):
            return found
        for attempt in np.unique(attempts).tolist():
            of_rank = np.full(int(ranks.max()) + 1, UNKNOWN, np.int64)
            for (at, rank), number in self.members.items():
                if at == attempt and rank < len(of_rank):
                    of_rank[rank] = number
            rows = attempts == attempt
            found[rows] = of_rank[ranks[rows]]
        return found

    def number_of(self, attempt: int, group_ranks: str) -> int:
        """The number of the set that has the ranks of a group."""
        return self.members.get((attempt, parse_ranks(group_ranks)[0]), UNKNOWN)

    def texts_of(self, numbers: Numbers) -> pa.Array:
        """The text of each number; null of :data:`UNKNOWN`."""
        known = pa.array(numbers, mask=numbers == UNKNOWN)
        return pa.array(self.texts, pa.string()).take(known)

    def table(self) -> pa.Table:
        """``attempt``, ``rank`` and ``group_number`` of each member."""
        names = ("attempt", "rank", "group_number")
        rows = [(*member, number) for member, number in self.members.items()]
        return pa.table(
            {name: pa.array([row[i] for row in rows], pa.int32()) for i, name in enumerate(names)}
        )


def bucket_groups(reducing: Iterable[tuple[int, str]]) -> BucketGroups:
    """The ranks that reduce buckets together.

    Args:
        reducing: attempt and ``group_ranks`` of the collectives that reduce buckets.
    """
    first_of: dict[tuple[int, int], int] = {}  # a rank of the same set, towards the lowest

    def lowest(attempt: int, rank: int) -> int:
        while first_of[attempt, rank] != rank:
            rank = first_of[attempt, rank]
        return rank

    for attempt, text in sorted(set(reducing)):
        ranks = parse_ranks(text)
        for rank in ranks:
            first_of.setdefault((attempt, rank), rank)
        ends = [lowest(attempt, rank) for rank in ranks]
        for end in ends:
            first_of[attempt, end] = min(ends)
    sets: dict[tuple[int, int], list[int]] = defaultdict(list)
    for attempt, rank in sorted(first_of):
        sets[attempt, lowest(attempt, rank)].append(rank)
    distinct = {tuple(ranks): format_ranks(ranks) for ranks in sets.values()}
    numbers = {ranks: number for number, ranks in enumerate(sorted(distinct))}
    members = {
        (attempt, rank): numbers[tuple(ranks)] for (attempt, _), ranks in sets.items() for rank in ranks
    }
    return BucketGroups(tuple(distinct[ranks] for ranks in sorted(distinct)), members)
