"""What stands in the index of a run beside its records: sums and answers, so that no question reads every record again.

Whatever is asked of whole collectives is worked out part by part (:mod:`commprof.analysis.whole_collectives`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Final, NamedTuple

import duckdb
import pandas as pd
import pyarrow as pa

from commprof.align.arrivals import NEEDED
from commprof.analysis import arrivals, buckets, exposure, straggling, transfers
from commprof.analysis.bucket_contents import KEY, described
from commprof.analysis.bucket_groups import BucketGroups, bucket_groups
from commprof.analysis.engine import query_text
from commprof.analysis.memory import give_back
from commprof.analysis.standstill import standstills
from commprof.analysis.sum_tables import BUCKET_SUMS, TransferTimes, append, keep_operations
from commprof.analysis.whole_collectives import IndexedParts, columns_of
from commprof.trace.reader import Run, Scan
from commprof.trace.tables import empty_table

BUCKET_FLUSHES: Final = "bucket_flushes"
BUCKET_MEANS: Final = "bucket_means"
STRAGGLING: Final = dict(
    zip(
        straggling.Straggling._fields,
        ("stragglers", "lateness", "waiting_causes", "late_collectives"),
        strict=True,
    )
)
EXPOSURES: Final = {  # by these columns
    ("attempt", "step"): "exposure_of_steps",
    ("attempt", "step", "purpose"): "exposure_of_purposes",
}
_COLUMNS: Final = columns_of(NEEDED, transfers.ALSO)
_WORKERS: Final = 2
_FEWEST_SCANNED: Final = 100_000  # rows that are read file by file
_AHEAD: Final = 2  # parts that are worked on at once

Progress = Callable[[int, int], None]


class _Found(NamedTuple):
    """What one part says."""

    times: pa.Table
    arrived: pa.Table


def fill_sums(
    engine: duckdb.DuckDBPyConnection,
    run: Run,
    stood: Future[dict[str, pa.Table]],
    flushed: Future[Flushing],
    progress: Progress,
) -> dict[str, str]:
    """Create the tables of sums and answers of the index of ``run`` in ``engine``'s database, which has its records.

    Args:
        stood: will be what :func:`standing` says.
        flushed: will be what :func:`flushing` says.
        progress: told how many parts of how many are done.

    Returns:
        What is to stand among the facts.

    Raises:
        TraceError: a file of the run is damaged. duckdb.Error: the database cannot be written.
    """
    with (
        ThreadPoolExecutor(_WORKERS) as pool,
        closing(straggling.Collector(hosts=arrivals.hosts_of(run))) as taken,
    ):
        times = TransferTimes(engine)
        for number, found in enumerate(_parts(engine, run, pool, progress)):
            taken.add(straggling.apart(found.arrived, number))
            times.add(found.times)
        times.end()
        give_back()  # what the parts took is left for what follows
        late = pool.submit(taken.answer)
        keep_operations(engine, run)
        _keep_buckets(engine, flushed.result())
        facts = _keep_straggling(engine, late.result())
        for name, rows in stood.result().items():
            append(engine, name, rows)
    progress(1, 1)
    return facts


def _parts(
    engine: duckdb.DuckDBPyConnection, run: Run, pool: ThreadPoolExecutor, progress: Progress
) -> Iterator[_Found]:
    """What the parts say, in their order; some are worked on while the one before is kept."""
    aligned = arrivals.aligned(run, transfers.ALSO)
    parts = IndexedParts(lambda sql: engine.sql(sql).to_arrow_table(), _COLUMNS)

    def work(condition: str) -> _Found:
        with engine.cursor() as cursor:
            rows = parts.read(condition, lambda sql: cursor.sql(sql).to_arrow_table())
        arrived = aligned(rows)
        return _Found(transfers.timed(arrived), arrived)

    under_way: deque[Future[_Found]] = deque()
    for number, condition in enumerate(parts.conditions):
        under_way.append(pool.submit(work, condition))
        if len(under_way) > _AHEAD:
            yield under_way.popleft().result()
            progress(number - _AHEAD, len(parts.conditions))
    while under_way:
        yield under_way.popleft().result()


def standing(run: Run) -> dict[str, pa.Table]:
    """What collectives cost in time, by the columns of :data:`EXPOSURES`.

    Raises:
        TraceError: a file of the run is damaged.
    """
    collectives, of_steps = run.scan("collectives", _FEWEST_SCANNED), run.table("steps")
    stalls = run.table("stalls")
    found = standing_of(process_times(collectives, of_steps, stalls), of_steps, stalls)
    give_back()  # what it took of each file is not needed again
    return found


def process_times(collectives: pa.Table | Scan, of_steps: pa.Table, stalls: pa.Table) -> list[pa.Table]:
    """What :func:`standing_of` is made of. Those of several processes are those of each, one after the other."""
    return [
        *standstills(collectives, of_steps, list(EXPOSURES), stalls),
        exposure.counts(collectives, max(EXPOSURES, key=len), stalls),
    ]


def standing_of(times: list[pa.Table], of_steps: pa.Table, stalls: pa.Table) -> dict[str, pa.Table]:
    """:func:`standing`, from the :func:`process_times` of all processes."""
    *stood, counted = times
    unused = empty_table("collectives")
    return {
        name: exposure.answer(unused, of_steps, by, stalls, each, counted)
        for (by, name), each in zip(EXPOSURES.items(), stood, strict=True)
    }


def _keep_straggling(engine: duckdb.DuckDBPyConnection, found: straggling.Straggling) -> dict[str, str]:
    for field, name in STRAGGLING.items():
        append(engine, name, rows_of(getattr(found, field)))
    return {"straggling": json.dumps(found.ranks.attrs)}


class Flushing(NamedTuple):
    """The buckets of a run without what reduced them, and which ranks reduce buckets together."""

    flushed: pa.Table
    groups: BucketGroups


def flushing(engine: duckdb.DuckDBPyConnection, run: Run) -> Flushing:
    """The buckets of ``run``, without what reduced them (:func:`commprof.analysis.buckets.flushed`).

    Args:
        engine: whose database has the records of the run.

    Raises:
        TraceError: a file of the run is damaged. duckdb.Error: the database cannot be read.
    """
    reducing = engine.execute(
        "select distinct r.attempt, k.group_ranks from records r join kinds k using (kind) "
        "where k.bucket is not null and k.purpose = 'gradient_reduce'"
    ).fetchall()
    groups = bucket_groups(reducing)
    held = described(lambda name: _column(run, "buckets", name), groups)
    own = (*KEY[:-1], "rank", "issue_ns", "return_ns", "wait_end_ns", "device_end_ns", "exposed_ns")
    names = ", ".join((*(f"r.{name}" for name in own), "k.bucket", "k.purpose"))
    which = "" if len(held) else "where false"  # nobody asks then
    engine.execute(
        f"create temp view collectives as select {names} from records r join kinds k using (kind) {which}"
    )
    engine.register("described", held)
    engine.register("members", groups.table())
    try:
        return Flushing(engine.sql(query_text("buckets")).to_arrow_table(), groups)
    finally:
        engine.unregister("described")
        engine.unregister("members")
        engine.execute("drop view collectives")


def _column(run: Run, table: str, name: str) -> pa.ChunkedArray:
    """A column of a table of ``run``, text as numbers into its distinct values; nothing else is read."""
    columns = [part[name] for part in run.parts(table, [name])]
    columns = [
        column.dictionary_encode() if pa.types.is_string(column.type) else column for column in columns
    ]
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], columns[0].type)


def _keep_buckets(engine: duckdb.DuckDBPyConnection, found: Flushing) -> None:
    """The buckets of the run with what reduced them, and those of a mean step."""
    sums = engine.sql(f"select * from {BUCKET_SUMS}").to_arrow_table()
    flushes = buckets.bucket_flushes(found.flushed, sums, found.groups)
    append(engine, BUCKET_FLUSHES, rows_of(flushes))
    append(engine, BUCKET_MEANS, rows_of(buckets.bucket_means(flushes)))
    engine.execute(f"drop table {BUCKET_SUMS}")


def rows_of(frame: pd.DataFrame) -> pa.Table:
    """A frame as a table, without what pandas adds."""
    return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
