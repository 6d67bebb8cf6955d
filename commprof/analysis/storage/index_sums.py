"""Sums and answers that are stored in the index of a run, so that questions need not read every record again.

Answers that need all records of a collective are computed partition by partition
(:mod:`commprof.analysis.time.partitions`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Final, NamedTuple

import duckdb
import pyarrow as pa

from commprof.align.ranks import cpp_waits
from commprof.align.ranks.rank_arrivals import NEEDED
from commprof.analysis.relations.memory import give_back
from commprof.analysis.storage.index_totals import OPERATIONS, SUMS, TransferTimes, append, rows_of
from commprof.analysis.stragglers import arrivals, straggling
from commprof.analysis.time import exposure, training_steps, transfers
from commprof.analysis.time.partitions import IndexedParts, columns_of
from commprof.analysis.time.stalls import stall_times_by, training_parts
from commprof.trace.reader import Run, Scan
from commprof.trace.tables import empty_table

STRAGGLING: Final = dict(
    zip(
        straggling.Straggling._fields,
        ("stragglers", "lateness", "waiting_causes", "late_collectives", "lateness_of_steps"),
        strict=True,
    )
)
EXPOSURES: Final = {  # the columns that exposed time is summed by, and the name of the table
    ("attempt", "step"): "exposure_of_steps",
    ("attempt", "step", "purpose"): "exposure_of_purposes",
}
STEP_TIMES: Final = "step_times"
_STEP: Final = ("attempt", "step")
_COLUMNS: Final = columns_of(NEEDED, transfers.ALSO)
_WORKERS: Final = 2
_FEWEST_SCANNED: Final = 100_000  # tables with more rows are read file by file
_AHEAD: Final = 2  # partitions that are evaluated while the caller stores another one

Progress = Callable[[int, int], None]


class _PartAnswer(NamedTuple):
    """The answer of one partition: the durations of its collectives, and the arrivals."""

    times: pa.Table
    arrived: pa.Table


def fill_sums(
    engine: duckdb.DuckDBPyConnection,
    run: Run,
    exposures: Future[dict[str, pa.Table]],
    operations_done: Future[None],
    progress: Progress,
) -> dict[str, str]:
    """Create the tables of sums and answers in the index of ``run``.

    Args:
        engine: A connection to the database of the index, which already contains the records of ``run``.
        run: The run.
        exposures: The future result of :func:`exposure_tables`.
        operations_done: A future that is done when the operations and buckets are written
            (``index_totals.keep_operations``).
        progress: A function that is called with the number of processed partitions and the number of all partitions.

    Returns:
        Entries for the table ``facts``.

    Raises:
        TraceError: A file of the run is damaged.
        duckdb.Error: The database cannot be written.
    """
    with (
        ThreadPoolExecutor(_WORKERS) as pool,
        closing(straggling.Collector(hosts=arrivals.hosts_of(run))) as collector,
    ):
        times = TransferTimes(engine)
        for number, part_answer in enumerate(_parts(engine, run, pool, progress)):
            collector.add(straggling.apart(part_answer.arrived, number))
            times.add(part_answer.times)
        times.end()
        give_back()  # frees the memory of the partitions for the next stage
        straggler_answer = pool.submit(collector.answer)
        operations_done.result()
        facts = _keep_straggling(engine, straggler_answer.result())
        for name, rows in exposures.result().items():
            append(engine, name, rows)
        append(engine, STEP_TIMES, _step_times(engine, run, exposures.result()[EXPOSURES[_STEP]]))
    progress(1, 1)
    return facts


def _step_times(engine: duckdb.DuckDBPyConnection, run: Run, exposed: pa.Table) -> pa.Table:
    columns = ", ".join((*training_steps.COLUMNS, "wire_ranks"))
    operations = engine.sql(f"select {columns}, {SUMS} from {OPERATIONS} group by {columns}").to_arrow_table()
    return training_steps.answer(run.table("steps"), exposed, operations)


def _parts(
    engine: duckdb.DuckDBPyConnection, run: Run, pool: ThreadPoolExecutor, progress: Progress
) -> Iterator[_PartAnswer]:
    """Yield the answers of the partitions in order. The next partitions are evaluated while the caller stores one."""
    aligned = arrivals.aligned(run, transfers.ALSO)
    waits = arrivals.cpp_waits(run)
    columns = _COLUMNS if waits is None else columns_of(_COLUMNS, cpp_waits.SOURCES)
    indexed_parts = IndexedParts(lambda sql: engine.sql(sql).to_arrow_table(), columns)

    def work(condition: str) -> _PartAnswer:
        with engine.cursor() as cursor:
            rows = indexed_parts.read(condition, lambda sql: cursor.sql(sql).to_arrow_table())
        arrived = aligned(rows if waits is None else waits.beside(rows))
        return _PartAnswer(transfers.timed(arrived), arrived)

    under_way: deque[Future[_PartAnswer]] = deque()
    for number, condition in enumerate(indexed_parts.conditions):
        under_way.append(pool.submit(work, condition))
        if len(under_way) > _AHEAD:
            yield under_way.popleft().result()
            progress(number - _AHEAD, len(indexed_parts.conditions))
    while under_way:
        yield under_way.popleft().result()


def exposure_tables(run: Run) -> dict[str, pa.Table]:
    """Return exposed and overlapped time by the columns of each of :data:`EXPOSURES`, as tables by name.

    Raises:
        TraceError: A file of the run is damaged.
    """
    collectives, of_steps = run.scan("collectives", _FEWEST_SCANNED), run.table("steps")
    stalls, parts = run.table("stalls"), training_parts(of_steps, run.table("outside_steps"))
    exposures = exposures_from(process_times(collectives, parts, stalls), of_steps, stalls)
    give_back()  # returns memory, because the columns that were read are not needed again
    return exposures


def process_times(collectives: pa.Table | Scan, parts: pa.Table, stalls: pa.Table) -> list[pa.Table]:
    """Return the input of :func:`exposures_from` for the records of one or several processes.

    If the processes are evaluated separately, concatenate their tables.

    Args:
        parts: The parts of the steps (:func:`training_parts`).
    """
    return [
        *stall_times_by(collectives, parts, list(EXPOSURES), stalls),
        exposure.counts(collectives, max(EXPOSURES, key=len), stalls),
    ]


def exposures_from(times: list[pa.Table], of_steps: pa.Table, stalls: pa.Table) -> dict[str, pa.Table]:
    """Return :func:`exposure_tables`, computed from the :func:`process_times` of all processes."""
    *stall_times, counted = times
    unused = empty_table("collectives")
    return {
        name: exposure.answer(unused, of_steps, by, stalls, each, counted)
        for (by, name), each in zip(EXPOSURES.items(), stall_times, strict=True)
    }


def _keep_straggling(engine: duckdb.DuckDBPyConnection, answer: straggling.Straggling) -> dict[str, str]:
    for field, name in STRAGGLING.items():
        append(engine, name, rows_of(getattr(answer, field)))
    return {"straggling": json.dumps(answer.ranks.attrs)}
