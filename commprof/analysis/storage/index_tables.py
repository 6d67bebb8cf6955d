"""Functions that fill the tables of the index of a run from the files of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from commprof.align.ranks.reference_clock import ReferenceClock
from commprof.analysis.browse.density import Numbers, binned, folded
from commprof.analysis.browse.lanes import Cells, keep_lanes
from commprof.analysis.storage.span_source import ORDER, SpanSource
from commprof.errors import TraceError
from commprof.schema import OPS
from commprof.trace.reader import Run

_ROWS_AT_A_TIME: Final = 500_000
_MOST_BINS: Final = 1 << 15
_MOST_CELLS: Final = 1 << 19  # ranks x bins
_FEWEST_BINS: Final = 1 << 9
FOLD: Final = 16  # fine bins in each coarse bin

_RECORDS: Final = "create table records as select * from spans"
_BUSY: Final = """
select rank, kind, end_ns, busy_ns, coalesce(held_end_ns, 0) as held_end_ns, still_ns
from records
where rowid >= ? and rowid < ?
"""
_PHASES: Final = """
with watched as (select attempt, min(rank) as rank from records group by attempt),
seen as (
    select r.attempt, r.step, r.micro_step, k.phase, r.begin_ns, r.end_ns, r.rowid as place
    from records r join watched w on r.attempt = w.attempt and r.rank = w.rank join kinds k using (kind)
),
marked as (
    select *,
        case when lag(phase) over (partition by attempt order by place) = phase
            and lag(step) over (partition by attempt order by place) = step
            and lag(micro_step) over (partition by attempt order by place) = micro_step then 0 else 1 end as is_new
    from seen
),
numbered as (
    select *, sum(is_new) over (partition by attempt order by place rows unbounded preceding) as band from marked
)
insert into bands
select 'phase', attempt, any_value(step), any_value(micro_step), any_value(phase), min(begin_ns), max(end_ns)
from numbered
group by attempt, band
"""


Progress = Callable[[int, int], None]


class Laid(NamedTuple):
    """Facts that are known after the records were sorted. ``clock`` is None if all processes share one clock."""

    clock: ReferenceClock | None
    unknown_clocks: int


def fill(engine: duckdb.DuckDBPyConnection, run: Run, facts: Mapping[str, Any], progress: Progress) -> None:
    """Create and fill the tables of the index of ``run`` in the database of ``engine``.

    Raises:
        TraceError: A file of the run is damaged.
        duckdb.Error: The database cannot be written.
    """
    fill_overview(engine, run, facts, fill_records(engine, run, progress))


def fill_records(engine: duckdb.DuckDBPyConnection, run: Run, progress: Progress) -> Laid:
    """Create the first tables: the records in order of time, and their kinds.

    Raises:
        TraceError: A file of the run is damaged.
        duckdb.Error: The database cannot be written.
    """
    source = SpanSource(run, progress)
    engine.register("spans", source.reader())
    try:
        engine.execute(_RECORDS if source.is_in_order else f"{_RECORDS} order by {', '.join(ORDER)}")
    except duckdb.Error:
        if source.failure is not None:  # the engine reports the failure of the source as its own failure
            raise source.failure from None
        raise
    finally:
        engine.unregister("spans")
    _keep(engine, "kinds", source.kinds.table())
    records = engine.execute("select count(*) from records").fetchall()[0][0]
    progress(records, records)
    return Laid(source.clock, source.unknown_clocks)


def fill_overview(engine: duckdb.DuckDBPyConnection, run: Run, facts: Mapping[str, Any], laid: Laid) -> None:
    """Create the tables that follow from the records: lanes, density, bands, facts.

    Raises:
        duckdb.Error: The database cannot be written.
    """
    records, begin, end = engine.execute(
        "select count(*), coalesce(min(begin_ns), 0), coalesce(max(end_ns), 0) from records"
    ).fetchall()[0]
    ranks = [row[0] for row in engine.execute("select distinct rank from records order by rank").fetchall()]
    levels = _fill_density(engine, ranks, begin, end, records)
    engine.execute(
        "create table bands (kind text, attempt integer, step integer, micro_step integer, name text, begin_ns bigint, "
        "end_ns bigint)"
    )
    _fill_steps(engine, run, laid.clock)
    engine.execute(_PHASES)
    overview = {
        "records": records,
        "begin_ns": begin,
        "end_ns": end,
        "ranks": ranks,
        "lanes": engine.execute("select count(*) from lanes").fetchall()[0][0],
        "ops": [row[0] for row in engine.execute("select distinct op from kinds order by op").fetchall()],
        "unknown_clocks": laid.unknown_clocks,
        "levels": levels,
        "state": run.health.state,
    }
    rows = [{"name": name, "value": value} for name, value in facts.items()]
    rows.append({"name": "facts", "value": json.dumps(overview)})
    _keep(engine, "facts", pa.Table.from_pylist(rows))


def _keep(engine: duckdb.DuckDBPyConnection, name: str, rows: pa.Table) -> None:
    engine.register("rows_to_keep", rows)
    engine.execute(f"create table {name} as select * from rows_to_keep")
    engine.unregister("rows_to_keep")


def _fill_density(
    engine: duckdb.DuckDBPyConnection, ranks: list[int], begin: int, end: int, records: int
) -> list[dict[str, int]]:
    """Create the table of busy and exposed time by rank, lane, operation and bin.

    Returns:
        The bin width in ns and the number of bins of each level, the coarse level first.
    """
    engine.execute(
        "create table density (level integer, rank integer, lane integer, op text, bin integer, busy_ns bigint, "
        "still_ns bigint)"
    )
    ops = engine.sql("select op from kinds order by kind").to_arrow_table()["op"]
    cells = keep_lanes(engine, ranks, numbers_of_ops(ops.to_pylist()))
    if not ranks:
        return []
    lanes = len(set(zip(cells.rank.tolist(), cells.lane.tolist(), strict=True)))
    # More lanes get fewer bins, which bounds memory and file size.
    bins = _bins(max(lanes, -(-len(cells.rank) // len(OPS))), records)
    width = max(1, -(-(end - begin) // bins))
    busy, still = (np.zeros((len(cells.rank), bins), np.int64) for _ in range(2))
    for first in range(0, records, _ROWS_AT_A_TIME):
        rows = engine.sql(_BUSY, params=[first, first + _ROWS_AT_A_TIME]).to_arrow_table()
        place = np.searchsorted(np.array(ranks), rows["rank"].to_numpy())
        row = cells.row[place, rows["kind"].to_numpy()]
        for sums, until, length in ((busy, "end_ns", "busy_ns"), (still, "held_end_ns", "still_ns")):
            ends, lengths = rows[until].to_numpy(), rows[length].to_numpy()
            sums += binned(ends - lengths, ends, row, len(sums), begin, width, bins)
    for level, factor in ((0, FOLD), (1, 1)):
        _keep_level(engine, level, cells, folded(busy, factor), folded(still, factor))
    return [{"width_ns": width * FOLD, "bins": bins // FOLD}, {"width_ns": width, "bins": bins}]


def _bins(ranks: int, records: int) -> int:
    """Return the number of fine bins. It is a power of two, so that all coarse bins contain equally many fine bins."""
    most = min(_MOST_BINS, max(_FEWEST_BINS, min(_MOST_CELLS // ranks, records)))
    return 1 << (most.bit_length() - 1)


def numbers_of_ops(names: Sequence[str]) -> Numbers:
    """Return the position of each of ``names`` in ``OPS``."""
    unknown = sorted({*names} - {*OPS})
    if unknown:
        raise TraceError(
            f"{unknown[0]!r} is not an operation of this version of commprof; install the version that recorded the run"
        )
    return np.array([OPS.index(name) for name in names], np.int64)


def _keep_level(
    engine: duckdb.DuckDBPyConnection, level: int, cells: Cells, busy: Numbers, still: Numbers
) -> None:
    """Write one level of the density in order of bin, rank, lane and operation."""
    place, cell = np.nonzero(np.ascontiguousarray(((busy | still) != 0).T))
    if not len(cell):
        return
    op = pa.array(cells.op[cell].astype(np.int8))
    rows = pa.table(
        {
            "level": np.full(len(cell), level, np.int32),
            "rank": cells.rank[cell].astype(np.int32),
            "lane": cells.lane[cell].astype(np.int32),
            "op": pa.DictionaryArray.from_arrays(op, pa.array(OPS)),
            "bin": place.astype(np.int32),
            "busy_ns": busy[cell, place],
            "still_ns": still[cell, place],
        }
    )
    engine.register("rows_to_keep", rows)
    engine.execute("insert into density select * from rows_to_keep")
    engine.unregister("rows_to_keep")


def _fill_steps(engine: duckdb.DuckDBPyConnection, run: Run, clock: ReferenceClock | None) -> None:
    """Write the steps of the lowest rank of each attempt as bands."""
    steps = run.table("steps")
    if not len(steps):
        return
    lowest: dict[int, int] = {}
    for attempt, rank in zip(steps["attempt"].to_pylist(), steps["rank"].to_pylist(), strict=True):
        lowest[attempt] = min(rank, lowest.get(attempt, rank))
    rows = [
        ("step", row["attempt"], row["step"], None, f"step {row['step']}", row["begin_ns"], row["end_ns"])
        for row in steps.select(["rank", "attempt", "pid", "step", "begin_ns", "end_ns"]).to_pylist()
        if row["rank"] == lowest[row["attempt"]] and row["end_ns"] is not None and row["step"] >= 0
        for row in [_on_the_clock(row, clock)]
    ]
    names = ("kind", "attempt", "step", "micro_step", "name", "begin_ns", "end_ns")
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    types = (pa.string(), pa.int32(), pa.int32(), pa.int32(), pa.string(), pa.int64(), pa.int64())
    table = pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], names)
    engine.register("rows_to_keep", table)
    engine.execute("insert into bands select * from rows_to_keep order by begin_ns")
    engine.unregister("rows_to_keep")


def _on_the_clock(row: dict[str, Any], clock: ReferenceClock | None) -> dict[str, Any]:
    if clock is None:
        return row
    times = np.array([row["begin_ns"], row["end_ns"]], np.int64)
    measured = clock.offset((row["rank"], row["attempt"], row["pid"]), times)
    begin, end = (times if measured is None else times + measured.offset_ns).tolist()
    return row | {"begin_ns": begin, "end_ns": end}
