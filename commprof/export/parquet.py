"""Exports runs as Parquet files: one per table, with the meaning and unit of every column in the schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from commprof.analysis.api import AnyRun, write_csv
from commprof.export.export_tables import (
    COMPARISONS,
    ExportedTable,
    exported_tables,
    opened_runs,
    table_names,
)
from commprof.export.files import ExportedFile, Progress, staged
from commprof.export.provenance import DICTIONARY, PROVENANCE, data_dictionary, provenance_text

_GROUP_ROWS: Final = 250_000


def export_parquet(
    run: AnyRun | Sequence[AnyRun],
    out: Path | str,
    tables: Sequence[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    empty: bool = False,
) -> list[ExportedFile]:
    """Write Parquet files of the tables and the comparison, a data dictionary and ``provenance.json`` into ``out``.

    The file of a table is ``<table>.parquet``.
    Arguments and errors are those of :func:`commprof.export.csv.export_csv`. The field of each column has metadata with
    the description and the unit.
    """
    names = table_names(tables)
    runs = opened_runs(run)
    compared = tables is None
    targets = [f"{name}.parquet" for name in names]
    targets += [f"{name}.parquet" for name in COMPARISONS] if compared else []
    with staged(Path(out), [*targets, DICTIONARY, PROVENANCE], force, progress) as staging:
        described = []
        for table in exported_tables(runs, tables, empty):
            described.append((table.name, table.columns))
            staging.adopt_rows(
                f"{table.name}.parquet", table.batches(), partial(_write, described_schema(table))
            )
        dictionary = data_dictionary(described)
        staging.write(DICTIONARY, partial(write_csv, dictionary), len(dictionary))
        staging.write_text(PROVENANCE, provenance_text(runs, staging.files))
    return staging.files


def described_schema(table: ExportedTable) -> pa.Schema:
    """Return the schema of ``table``, with the meaning and unit of each column as metadata of its field."""
    fields = []
    for item, column in zip(table.schema, table.columns, strict=True):
        about: dict[Any, Any] = {b"description": column.doc.encode()}
        if column.unit:
            about[b"unit"] = column.unit.encode()
        fields.append(item.with_metadata(about))
    return pa.schema(fields, metadata=table.schema.metadata)


def _write(schema: pa.Schema, batches: Iterator[pa.Table], path: Path) -> None:
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in _groups(batches):
            writer.write_table(group.cast(schema))


def _groups(batches: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows of ``batches``, concatenated into row groups of at least ``_GROUP_ROWS`` rows.

    The last group may be smaller.
    """
    pending: list[pa.Table] = []
    for batch in batches:
        pending.append(batch)
        if sum(map(len, pending)) >= _GROUP_ROWS:
            yield pa.concat_tables(pending)
            pending = []
    if pending:
        yield pa.concat_tables(pending)
