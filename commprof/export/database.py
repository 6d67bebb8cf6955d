"""Exports runs as one DuckDB database: the tables of the schema, with comments, and the comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

from commprof.analysis import api
from commprof.analysis.api import AnyRun
from commprof.errors import TraceError
from commprof.export.export_tables import ExportedTable, exported_tables, opened_runs, table_names
from commprof.export.files import ExportedFile, Progress, staged
from commprof.export.provenance import PROVENANCE, provenance_text
from commprof.schema import TABLES

DATABASE: Final = "run.duckdb"
_MOST_MEMORY: Final = 512 << 20


def export_database(
    run: AnyRun | Sequence[AnyRun],
    out: Path | str,
    tables: Sequence[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    empty: bool = False,
) -> list[ExportedFile]:
    """Write ``run.duckdb`` and ``provenance.json`` into ``out``: a table for each of ``tables``, and the comparison.

    Arguments and errors are those of :func:`commprof.export.csv.export_csv`.
    """
    table_names(tables)  # refuses an unknown table before anything is written
    runs = opened_runs(run)
    with staged(Path(out), [DATABASE, PROVENANCE], force, progress) as staging:
        exported = tuple(exported_tables(runs, tables, empty))
        counted: list[int] = []
        staging.adopt(DATABASE, lambda path: counted.extend(_write(path, exported, staging.tell)))
        staging.with_rows(sum(counted))
        staging.write_text(PROVENANCE, provenance_text(runs, staging.files))
    return staging.files


def _write(path: Path, tables: Sequence[ExportedTable], tell: Progress) -> Iterator[int]:
    """Write the tables one after the other, and yield the number of rows of each table."""
    try:
        with duckdb.connect(str(path), config=api.engine_settings(_MOST_MEMORY)) as database:
            for table in tables:
                yield _filled(database, table, tell)
                if table.name in TABLES:
                    database.execute(
                        f"COMMENT ON TABLE {_name(table.name)} IS {_text(TABLES[table.name].doc)}"
                    )
                for column in table.columns:
                    comment = f"{column.doc} ({column.unit})" if column.unit else column.doc
                    database.execute(
                        f"COMMENT ON COLUMN {_name(table.name)}.{_name(column.name)} IS {_text(comment)}"
                    )
    except duckdb.Error as error:
        raise TraceError(f"the database cannot be written: {str(error).partition(chr(10))[0]}") from None


def _filled(database: duckdb.DuckDBPyConnection, table: ExportedTable, tell: Progress) -> int:
    """Create ``table``, insert its batches, and return the number of rows."""
    rows = 0
    failures: list[TraceError] = []

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        try:
            for part in table.batches():
                yield from part.to_batches()
                rows += len(part)
                tell(f"{DATABASE}: {table.name}, {rows:,} rows")
        except TraceError as error:  # stored, because DuckDB reports the error as its own
            failures.append(error)
            raise

    database.register("rows_of_the_run", pa.RecordBatchReader.from_batches(table.schema, batches()))
    try:
        database.execute(f"CREATE TABLE {_name(table.name)} AS SELECT * FROM rows_of_the_run")
    except duckdb.Error:
        if failures:
            raise failures[0] from None
        raise
    finally:
        database.unregister("rows_of_the_run")
    return rows


def _name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
