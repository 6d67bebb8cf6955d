"""Tables of an index that are filled part by part: operations added up, and how long collectives took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import duckdb
import pyarrow as pa

from commprof.analysis import buckets, traffic
from commprof.analysis.bandwidth_answers import BANDWIDTH_TIMES as TIMES
from commprof.analysis.combinations import KIND, Combinations

OPERATIONS: Final = "operations"
BANDWIDTH_TIMES: Final = "bandwidth_times"
BUCKET_SUMS: Final = "bucket_sums"
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
)
MEASURES: Final = {
    "collectives": "bigint",
    "records": "bigint",
    "payload_bytes": "bigint",
    "wire_share": "decimal(38, 0)",
    "executed_share": "decimal(38, 0)",
    "unexecuted": "bigint",
    "host_ns": "double",
    "exposed_ns": "double",
    "timed": "bigint",
    "tensors": "bigint",
}
_TIMES_OWN: Final = ("attempt", "step", "error_ns", "time_ns")
_TOLD: Final = TIMES.names[: TIMES.names.index("time_source") + 1]  # the others follow from these
_NUMBERS: Final = {"group_size": pa.int32(), "payload_bytes": pa.int64()}
_TIMES_KINDS: Final = pa.schema(
    [(name, _NUMBERS.get(name, pa.string())) for name in _TOLD if name not in _TIMES_OWN]
)
_ROWS_AT_ONCE: Final = 200_000  # that are kept: an engine writes fewer twice


class OperationSums:
    """The operations of a run (:func:`commprof.analysis.traffic.once`) added up by ``columns``, many parts at once."""

    def __init__(
        self, engine: duckdb.DuckDBPyConnection, aggregates: pa.Table, columns: Sequence[str]
    ) -> None:
        self._engine = engine
        self._columns = columns
        self._aggregates = aggregates
        self._held: list[traffic.Once] = []

    def add(self, once: traffic.Once) -> None:
        """Take those of one part."""
        self._held.append(once)
        if sum(len(each.collectives) + len(each.messages) for each in self._held) >= _ROWS_AT_ONCE:
            self.end()

    def end(self) -> None:
        """Keep what is left."""
        if not self._held:
            return
        found = traffic.added_up(traffic.joined(self._held), self._aggregates, self._columns)
        self._held.clear()
        self._aggregates = self._aggregates.slice(0, 0)  # they count once
        self._keep(OPERATIONS, HELD_COLUMNS, found)
        of_buckets = "where bucket is not null and purpose = 'gradient_reduce'"
        self._keep(BUCKET_SUMS, buckets.COLUMNS, found, of_buckets)

    def _keep(self, name: str, by: Sequence[str], operations: pa.Table, where: str = "") -> None:
        columns = ", ".join((*by, "wire_ranks"))
        sums = ", ".join(f"cast(sum({measure}) as {kind}) as {measure}" for measure, kind in MEASURES.items())
        sql = f"select {columns}, {sums} from rows_to_add {where} group by {columns}"
        append(self._engine, name, operations, sql)


class TransferTimes:
    """How long collectives took (:func:`commprof.analysis.transfers.timed`); what repeats once for each combination."""

    def __init__(self, engine: duckdb.DuckDBPyConnection) -> None:
        self._engine = engine
        self._kinds = Combinations(_TIMES_KINDS)
        self._held: list[pa.Table] = []

    def add(self, times: pa.Table) -> None:
        """Take those of one part."""
        kind = pa.array(self._kinds.number(times), pa.int32())
        self._held.append(times.select(_TIMES_OWN).append_column(KIND, kind))
        if sum(map(len, self._held)) >= _ROWS_AT_ONCE:
            self._keep()

    def _keep(self) -> None:
        append(self._engine, "transfer_times", pa.concat_tables(self._held))
        self._held.clear()

    def end(self) -> None:
        """Keep what is left."""
        if self._held:
            self._keep()
        append(self._engine, "transfer_kinds", self._kinds.table())
        columns = ", ".join(f"{'t' if name in _TIMES_OWN else 'k'}.{name}" for name in _TOLD)
        self._engine.execute(
            f"create view {BANDWIDTH_TIMES} as select {columns} from transfer_times t join transfer_kinds k using ({KIND})"
        )


def append(
    engine: duckdb.DuckDBPyConnection, name: str, rows: pa.Table, sql: str = "select * from rows_to_add"
) -> None:
    """Put ``rows``, or what ``sql`` makes of them, into table ``name``, which is created by the first of them."""
    engine.register("rows_to_add", rows)
    try:
        engine.execute(f"create table if not exists {name} as {sql} limit 0")
        engine.execute(f"insert into {name} {sql}")
    finally:
        engine.unregister("rows_to_add")
