"""Tables of an index that contain totals: operations, gradient buckets, and the durations of collectives."""

from __future__ import annotations

from typing import Final

import duckdb
import pandas as pd
import pyarrow as pa

from commprof.analysis.columns.bandwidth_answers import BANDWIDTH_TIMES as TIMES
from commprof.analysis.columns.detailed_answers import BUCKET_FLUSHES as FLUSHES
from commprof.analysis.columns.distinct_combinations import KIND, Combinations
from commprof.analysis.columns.frames import from_arrow
from commprof.analysis.relations.relation_graph import statement, tables_of
from commprof.analysis.relations.sql_engine import MADE, keep_agreement, made_of, query_text, register
from commprof.analysis.storage.record_spans import KIND_COLUMNS
from commprof.analysis.traffic import buckets
from commprof.schema import COLLECTIVES
from commprof.trace.reader import Run

OPERATIONS: Final = "operations"
BANDWIDTH_TIMES: Final = "bandwidth_times"
BUCKET_FLUSHES: Final = "bucket_flushes"
BUCKET_MEANS: Final = "bucket_means"
HELD_COLUMNS: Final = (
    "attempt",
    "step",
    "after_step",
    "phase",
    "op",
    "intended_op",
    "purpose",
    "pg",
    "group_desc",
    "group_ranks",
    "group_size",
    "backend",
    "root",
    "sender",
    "receiver",
    "call_bytes",
    "span",
)
MEASURES: Final = {
    "collectives": "bigint",
    "records": "bigint",
    "payload_bytes": "bigint",
    "padding_bytes": "bigint",
    "wire_share": "decimal(38, 0)",
    "executed_share": "decimal(38, 0)",
    "unexecuted": "bigint",
    "between_share": "decimal(38, 0)",
    "unlocated": "bigint",
    "host_ns": "double",
    "exposed_ns": "double",
    "timed": "bigint",
    "tensors": "bigint",
}
SUMS: Final = ", ".join(f"cast(sum({name}) as {kind}) as {name}" for name, kind in MEASURES.items())
_TIMES_OWN: Final = ("attempt", "step", "error_ns", "time_ns")
_STORED: Final = TIMES.names[: TIMES.names.index("time_source") + 1]  # the other columns follow from these
_NUMBERS: Final = {"group_size": pa.int32(), "payload_bytes": pa.int64()}
_TIMES_KINDS: Final = pa.schema(
    [(name, _NUMBERS.get(name, pa.string())) for name in _STORED if name not in _TIMES_OWN]
)
_FEWEST_SCANNED: Final = 100_000  # the engine reads tables with more rows from their files
_ROWS_AT_ONCE: Final = 200_000  # rows of a batch; the engine writes smaller batches twice


def keep_operations(engine: duckdb.DuckDBPyConnection, run: Run) -> None:
    """Create the tables of operations and gradient buckets in the index of ``run``.

    The input is the records in the database of ``engine``.

    Raises:
        TraceError: A table of the run is damaged.
        duckdb.Error: The database cannot be written.
    """
    columns = ", ".join(f"{'k' if name in KIND_COLUMNS else 'r'}.{name}" for name in COLLECTIVES.names)
    with engine.cursor() as cursor:
        cursor.execute(
            f"create temp view collectives as select {columns} from records r join kinds k using (kind)"
        )
        cursor.register("aggregates", run.table("aggregates"))
        cursor.register("groups", run.table("groups"))
        register(cursor, "buckets", run.scan("buckets", _FEWEST_SCANNED))
        for name in set(MADE) & {*tables_of("operations"), *tables_of(BUCKET_FLUSHES)}:
            rows = made_of(name, lambda question: cursor.sql(query_text(question)).to_arrow_table())
            cursor.register(name, rows)
        every = tuple(dict.fromkeys((*HELD_COLUMNS, *buckets.COLUMNS)))
        known = keep_agreement(cursor, "operations", every)
        cursor.execute(f"create temp table every_operation as {statement('operations', every, known=known)}")
        names = ", ".join((*HELD_COLUMNS, "wire_ranks"))
        cursor.execute(
            f"create table {OPERATIONS} as select {names}, {SUMS} from every_operation group by {names}"
        )
        flushes = cursor.sql(statement(BUCKET_FLUSHES, known={"operations": "every_operation"}))
        flush_rows = buckets.in_order(flushes.to_arrow_table())
        append(cursor, BUCKET_FLUSHES, flush_rows)
        means = buckets.bucket_means(from_arrow(flush_rows, FLUSHES.columns))
        append(cursor, BUCKET_MEANS, rows_of(means))
        for table in ("every_operation", *known.values()):
            cursor.execute(f"drop table {table}")


class TransferTimes:
    """Writes the durations of collectives (:func:`commprof.analysis.time.transfers.timed`) to the index.

    Each combination of repeated values is written only once.
    """

    def __init__(self, engine: duckdb.DuckDBPyConnection) -> None:
        self._engine = engine
        self._kinds = Combinations(_TIMES_KINDS)
        self._pending: list[pa.Table] = []

    def add(self, times: pa.Table) -> None:
        """Add the rows of one partition."""
        kind = pa.array(self._kinds.number(times), pa.int32())
        self._pending.append(times.select(_TIMES_OWN).append_column(KIND, kind))
        if sum(map(len, self._pending)) >= _ROWS_AT_ONCE:
            self._keep()

    def _keep(self) -> None:
        append(self._engine, "transfer_times", pa.concat_tables(self._pending))
        self._pending.clear()

    def end(self) -> None:
        """Write the remaining rows."""
        if self._pending:
            self._keep()
        append(self._engine, "transfer_kinds", self._kinds.table())
        columns = ", ".join(f"{'t' if name in _TIMES_OWN else 'k'}.{name}" for name in _STORED)
        self._engine.execute(
            f"create view {BANDWIDTH_TIMES} as select {columns} from transfer_times t join transfer_kinds k using ({KIND})"
        )


def append(
    engine: duckdb.DuckDBPyConnection, name: str, rows: pa.Table, sql: str = "select * from rows_to_add"
) -> None:
    """Append ``rows``, or the result of ``sql`` over them, to table ``name``. The first call creates the table."""
    engine.register("rows_to_add", rows)
    try:
        engine.execute(f"create table if not exists {name} as {sql} limit 0")
        engine.execute(f"insert into {name} {sql}")
    finally:
        engine.unregister("rows_to_add")


def rows_of(frame: pd.DataFrame) -> pa.Table:
    """Convert a frame to a table without the metadata of pandas."""
    return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
