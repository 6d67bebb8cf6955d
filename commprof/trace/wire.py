"""The table of the machine's counters, from the files of those who read them: the launcher, and one rank per host."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from commprof.errors import TraceError
from commprof.schema import TABLES
from commprof.trace.tables import arrow_schema, read_parquet, table_from_rows, write_parquet

LAUNCHER_READINGS: Final = "wire.jsonl"  # at intervals
STEP_READINGS: Final = "wire"  # a directory
_COLUMNS: Final = [column.name for column in TABLES["wire"].columns]


def reading_files(run: Path) -> list[Path]:
    """The files of readings that are no table yet: the launcher's, and those of the ranks that read at steps."""
    return [
        file
        for file in (run / LAUNCHER_READINGS, *sorted((run / STEP_READINGS).glob("*.jsonl")))
        if file.exists()
    ]


def write_wire(run: Path) -> None:
    """The readings as the ``wire`` table, beside those that it holds; their files are removed once it holds them."""
    sources = reading_files(run)
    if not sources:
        return
    file = run / "wire.parquet"
    present = [read_parquet(file, "wire")] if file.exists() else []
    # A file whose rows the table holds already is there again where its removal failed.
    table = pa.concat_tables([*present, read_readings(sources)]).group_by(_COLUMNS).aggregate([])
    table = table.sort_by([("host", "ascending"), ("device", "ascending"), ("time_ns", "ascending")])
    write_parquet(file, table.select(_COLUMNS).cast(arrow_schema("wire")))
    if len(read_parquet(file, "wire")) == len(table):
        for source in sources:
            source.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (run / STEP_READINGS).rmdir()


def read_readings(sources: Sequence[Path]) -> pa.Table:
    """The rows of ``sources``; a line that was cut off is left out."""
    rows: list[dict[str, Any]] = []
    for source in sources:
        for line in source.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
    try:
        return table_from_rows("wire", rows)
    except TraceError:
        return table_from_rows("wire", [row for row in rows if _is_reading(row)])


def _is_reading(row: dict[str, Any]) -> bool:
    try:
        table_from_rows("wire", [row])
    except TraceError:
        return False
    return True
