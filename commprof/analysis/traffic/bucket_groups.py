"""Find the ranks that reduce gradient buckets together.

These ranks distinguish buckets that have the same number in several groups. Pipeline stages and
tensor-parallel ranks use the same bucket numbers and reduce the buckets in separate groups. A bucket that is
reduced along several axes in turn is one bucket of all their ranks, so groups that share a rank are joined.
The functions are pure.
"""

from __future__ import annotations

from collections import defaultdict

import pyarrow as pa

from commprof.schema import format_ranks, parse_ranks


def bucket_groups(reducing: pa.Table) -> pa.Table:
    """Return for each rank that reduces buckets the ranks with which it reduces them.

    The columns are attempt, rank and group_ranks. group_ranks is the text of all these ranks.

    Args:
        reducing: The attempt and ``group_ranks`` of the collectives that reduce buckets
            (``queries/reducing_groups.sql``).

    Raises:
        TraceError: A text contains no ranks.
    """
    # A lower rank of the same set, or the rank itself if it is the lowest.
    first_of: dict[tuple[int, int], int] = {}

    def lowest(attempt: int, rank: int) -> int:
        while first_of[attempt, rank] != rank:
            rank = first_of[attempt, rank]
        return rank

    pairs = zip(reducing["attempt"].to_pylist(), reducing["group_ranks"].to_pylist(), strict=True)
    for attempt, text in sorted(set(pairs)):
        ranks = parse_ranks(text)
        for rank in ranks:
            first_of.setdefault((attempt, rank), rank)
        ends = [lowest(attempt, rank) for rank in ranks]
        for end in ends:
            first_of[attempt, end] = min(ends)
    sets: dict[tuple[int, int], list[int]] = defaultdict(list)
    for attempt, rank in sorted(first_of):
        sets[attempt, lowest(attempt, rank)].append(rank)
    rows = [
        (attempt, rank, text)
        for (attempt, _), ranks in sets.items()
        for text in [format_ranks(ranks)]
        for rank in ranks
    ]
    kinds = {"attempt": pa.int32(), "rank": pa.int32(), "group_ranks": pa.string()}
    return pa.table(
        {name: pa.array([row[i] for row in rows], kind) for i, (name, kind) in enumerate(kinds.items())}
    )
