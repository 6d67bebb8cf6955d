"""The sums that stand in the index of a run, so that its questions need not read every record again."""

from __future__ import annotations

from typing import Final

import duckdb
import pyarrow as pa

from commprof.analysis import exposure, steps, traffic
from commprof.trace.reader import Run

OPERATIONS: Final = "operations"
STOOD_STILL: Final = "stood_still"
EXPOSURES: Final = {  # by these columns
    ("attempt", "step"): "exposure_of_steps",
    ("attempt", "step", "purpose"): "exposure_of_purposes",
}
HELD_COLUMNS: Final = (
    "attempt",
    "step",
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
)
MEASURES: Final = {
    "collectives": "bigint",
    "records": "bigint",
    "payload_bytes": "bigint",
    "wire_share": "decimal(38, 0)",
    "host_ns": "double",
    "exposed_ns": "double",
    "timed": "bigint",
    "tensors": "bigint",
}


def fill_sums(engine: duckdb.DuckDBPyConnection, run: Run) -> None:
    """Create the tables of sums of the index of ``run`` in ``engine``'s database.

    Raises:
        TraceError: a file of the run is damaged. duckdb.Error: the database cannot be written.
    """
    collectives = run.scan("collectives")
    _keep(engine, OPERATIONS, traffic.operations(collectives, run.table("aggregates"), HELD_COLUMNS))
    _keep(engine, STOOD_STILL, steps.stood_still(run.table("steps"), collectives))
    for by, name in EXPOSURES.items():
        _keep(engine, name, exposure.answer(collectives, run.table("steps"), by))


def _keep(engine: duckdb.DuckDBPyConnection, name: str, rows: pa.Table) -> None:
    engine.register("sums_to_keep", rows)
    engine.execute(f"create table {name} as select * from sums_to_keep")
    engine.unregister("sums_to_keep")
