"""Lanes: the process groups of each rank as separate rows of the timeline.

A rank has one lane for each of its groups. The largest group is first, as in the bars of a window. If a rank has more
than :data:`MOST_OF_RANK` groups, the groups that are busiest over the run have one lane each. The other groups share
the last lane. A run has no lanes if no rank has two groups, or if there are too many ranks or lanes to display.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from commprof.analysis.browse.density import Numbers
from commprof.schema import OPS

MOST_OF_RANK: Final = 4
_MOST: Final = 256  # maximum number of ranks, and of lanes of all ranks
_USED: Final = """
create temp table used as
select u.rank, u.kind, u.busy_ns, k.op, k.pg, k.group_desc, k.group_ranks, k.group_size
from (select rank, kind, sum(busy_ns) as busy_ns from records group by rank, kind) u join kinds k using (kind)
"""
_GROUPS: Final = """
select rank, group_size, pg, group_ranks, max(group_desc), sum(busy_ns) from used group by rank, group_size, pg, group_ranks
"""
# Joins the lane of each row `r` whose kind is `k`.
JOINED: Final = """
left join lanes l on l.rank = r.rank and l.pg is not distinct from k.pg
    and l.group_ranks is not distinct from k.group_ranks and l.groups = 1
"""
NUMBER: Final = f"coalesce(l.lane, {MOST_OF_RANK - 1})"
_LANES_OF_KINDS: Final = (
    f"select k.rank, k.kind, k.op, {NUMBER} as lane from used k {JOINED.replace('r.rank', 'k.rank')}"
)
LANES: Final = pa.schema(
    [
        ("rank", pa.int32()),
        ("lane", pa.int32()),
        ("pg", pa.string()),
        ("group_desc", pa.string()),
        ("group_ranks", pa.string()),
        ("groups", pa.int32()),
    ]
)


class Lane(NamedTuple):
    """One lane of a rank. A lane of several groups has no group name and no ranks."""

    rank: int
    lane: int  # number of the lane within the rank
    pg: str | None
    group_desc: str | None
    group_ranks: str | None
    groups: int


class Cells(NamedTuple):
    """The rows of the density table, in order of rank, lane and operation number."""

    rank: Numbers
    lane: Numbers
    op: Numbers
    row: Numbers  # ranks x kinds: the row in which a record counts, by position of the rank and kind


def keep_lanes(engine: duckdb.DuckDBPyConnection, ranks: Sequence[int], op_of_kind: Numbers) -> Cells:
    """Create the table ``lanes`` and return the rows that the density table of the run needs.

    The table is empty if groups are not distinguished.

    Args:
        ranks: The ranks of the run, in order.
        op_of_kind: The number of the operation of each kind.

    Raises:
        duckdb.Error: The database cannot be written.
    """
    _keep(engine, [])
    groups = engine.execute("select count(*) from (select distinct pg, group_ranks from kinds)").fetchall()
    if groups[0][0] < 2 or len(ranks) > _MOST:
        return _joined_cells(ranks, op_of_kind)
    engine.execute(_USED)
    try:
        lanes = _lanes([_Group(*row) for row in engine.execute(_GROUPS).fetchall()])
        if len(ranks) < len(lanes) <= _MOST:
            _keep(engine, lanes)
            return _cells(engine, ranks, len(op_of_kind))
    finally:
        engine.execute("drop table used")
    return _joined_cells(ranks, op_of_kind)


class _Group(NamedTuple):
    """One group of a rank, and the time in ns in which its collectives were in progress."""

    rank: int
    size: int
    pg: str
    ranks: str
    desc: str | None
    busy_ns: int

    def order(self) -> tuple[int, tuple[int, int, str], str]:
        return order_of_group(self.size, self.pg, self.ranks)


def _lanes(groups: Sequence[_Group]) -> list[Lane]:
    """Return the lanes of all ranks."""
    of_rank: defaultdict[int, list[_Group]] = defaultdict(list)
    for group in groups:
        of_rank[group.rank].append(group)
    lanes = []
    for rank, groups_of_rank in sorted(of_rank.items()):
        groups_of_rank.sort(key=lambda group: (-group.busy_ns, group.order()))
        named = groups_of_rank if len(groups_of_rank) <= MOST_OF_RANK else groups_of_rank[: MOST_OF_RANK - 1]
        for number, group in enumerate(sorted(named, key=_Group.order)):
            lanes.append(Lane(rank, number, group.pg, group.desc, group.ranks, 1))
        if len(named) < len(groups_of_rank):
            lanes.append(Lane(rank, MOST_OF_RANK - 1, None, None, None, len(groups_of_rank) - len(named)))
    return lanes


def order_of_group(size: int, pg: str, ranks: str) -> tuple[int, tuple[int, int, str], str]:
    """Return the sort key of a group: the largest group first, then by name, where numeric names sort as numbers."""
    number = pg.isdecimal() and len(pg) < 19
    return -size, ((0, int(pg), "") if number else (1, 0, pg)), ranks


def _joined_cells(ranks: Sequence[int], op_of_kind: Numbers) -> Cells:
    count = len(ranks) * len(OPS)
    place, op = np.divmod(np.arange(count), len(OPS))
    row = np.arange(len(ranks))[:, None] * len(OPS) + op_of_kind[None, :]
    return Cells(np.array(ranks, np.int64)[place], np.zeros(count, np.int64), op, row)


def _cells(engine: duckdb.DuckDBPyConnection, ranks: Sequence[int], kinds: int) -> Cells:
    lanes = engine.sql(_LANES_OF_KINDS).to_arrow_table()
    place = np.searchsorted(np.array(ranks), lanes["rank"].to_numpy())
    number_of_op = {name: number for number, name in enumerate(OPS)}
    op = np.array([number_of_op[name] for name in lanes["op"].to_pylist()], np.int64)
    codes = (place * MOST_OF_RANK + lanes["lane"].to_numpy()) * len(OPS) + op
    distinct, row_of = np.unique(codes, return_inverse=True)
    row = np.zeros((len(ranks), kinds), np.int64)
    row[place, lanes["kind"].to_numpy()] = row_of
    lane, op = np.divmod(distinct, len(OPS))
    return Cells(np.array(ranks, np.int64)[lane // MOST_OF_RANK], lane % MOST_OF_RANK, op, row)


def _keep(engine: duckdb.DuckDBPyConnection, lanes: Sequence[Lane]) -> None:
    rows = pa.Table.from_pylist([lane._asdict() for lane in lanes], LANES)
    engine.register("lanes_to_keep", rows)
    engine.execute("create or replace table lanes as select * from lanes_to_keep")
    engine.unregister("lanes_to_keep")
