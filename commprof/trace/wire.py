"""Converts readings of counters and samplers from JSON lines to tables.

The launcher writes files of readings, and so does one rank per host.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from commprof.errors import TraceError
from commprof.schema import TABLES
from commprof.trace.content import read_content
from commprof.trace.directory import EVERY_SAMPLES
from commprof.trace.rank_files.outside_rows import fitted
from commprof.trace.tables import arrow_schema, read_parquet, write_parquet

LAUNCHER_READINGS: Final = "wire.jsonl"  # the readings of the launcher, taken at intervals
STEP_READINGS: Final = "wire"  # the directory of the readings that ranks take at steps
DAMAGED_LINES: Final = "are damaged and were left out"


def reading_files(run: Path) -> list[Path]:
    """Return the files of counter readings that are not in a table yet, of the launcher and of ranks."""
    return [
        file
        for file in (run / LAUNCHER_READINGS, *sorted((run / STEP_READINGS).glob("*.jsonl")))
        if file.is_file()
    ]


def write_wire(run: Path) -> None:
    """Write the readings of counters into the ``wire`` table."""
    absorb(run, "wire", reading_files(run), ("host", "device", "time_ns"))
    with contextlib.suppress(OSError):
        (run / STEP_READINGS).rmdir()


def sample_files(run: Path) -> list[Path]:
    """Return the files of samplers that are not in a table yet, of the launcher and of other hosts."""
    return [file for file in sorted(run.glob(EVERY_SAMPLES)) if file.is_file()]


def write_samples(run: Path) -> None:
    """Write the readings of samplers into the ``samples`` table."""
    absorb(run, "samples", sample_files(run), ("host", "source", "device", "name", "time_ns"))


def absorb(run: Path, name: str, sources: Sequence[Path], order: Sequence[str]) -> None:
    """Add the rows of ``sources`` to table ``name``, then remove ``sources``.

    Args:
        run: The run directory.
        name: The name of the table.
        sources: The files of readings.
        order: The columns to sort the table by.
    """
    if not sources:
        return
    file = run / f"{name}.parquet"
    columns = list(TABLES[name].names)
    present = [read_parquet(file, name)] if file.exists() else []
    # Duplicate rows are removed, because a file whose rows are in the table still exists if its removal failed.
    table = pa.concat_tables([*present, read_readings(sources, name)]).group_by(columns).aggregate([])
    table = table.sort_by([(column, "ascending") for column in order])
    write_parquet(file, table.select(columns).cast(arrow_schema(name)))
    if len(read_parquet(file, name)) == len(table):
        for source in sources:
            source.unlink(missing_ok=True)


def read_readings(sources: Sequence[Path], name: str = "wire") -> pa.Table:
    """Read the rows of ``sources`` as table ``name``. Truncated lines and rows that do not fit the table are left out.

    Raises:
        TraceError: A file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for source in sources:
        rows += _rows_of(source)[0]
    return fitted(name, rows).table


def damaged_lines(run: Path) -> list[str]:
    """Return a sentence for each file of readings with lines that :func:`read_readings` leaves out.

    Only files that are not in a table yet are checked. A truncated last line is not counted.

    Raises:
        TraceError: A file cannot be read.
    """
    remarks = []
    for name, files in (("wire", reading_files(run)), ("samples", sample_files(run))):
        for file in files:
            rows, lines = _rows_of(file)
            fitting = fitted(name, rows)
            damaged = lines - len(rows) + fitting.left_out
            if damaged:
                hosts = sorted(set(fitting.table["host"].to_pylist()))
                of = f" of host {', '.join(hosts)}" if hosts else ""
                remarks.append(f"{file.relative_to(run)}{of}: {damaged:,} of {lines:,} lines {DAMAGED_LINES}")
    return remarks


def _rows_of(source: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file of readings and its number of lines. A truncated last line is not counted."""
    try:
        content = read_content(source)
    except OSError as error:
        raise TraceError(f"{source} cannot be read: {error.strerror}") from None
    rows: list[dict[str, Any]] = []
    lines = content.splitlines()
    counted = sum(1 for line in lines if line.strip())
    is_cut = bool(lines) and not content.endswith(b"\n")
    for place, line in enumerate(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if is_cut and place == len(lines) - 1:
                counted -= 1
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows, counted
