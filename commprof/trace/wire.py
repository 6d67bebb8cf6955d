"""Converts readings of counters and samplers to tables, from the files of the launcher and of one rank per host."""

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

LAUNCHER_READINGS: Final = "wire.jsonl"  # at intervals
STEP_READINGS: Final = "wire"  # a directory
DAMAGED_LINES: Final = "are damaged and were left out"


def reading_files(run: Path) -> list[Path]:
    """The files of readings that are no table yet: the launcher's, and those of the ranks that read at steps."""
    return [
        file
        for file in (run / LAUNCHER_READINGS, *sorted((run / STEP_READINGS).glob("*.jsonl")))
        if file.is_file()
    ]


def write_wire(run: Path) -> None:
    """The readings of counters as the ``wire`` table."""
    absorb(run, "wire", reading_files(run), ("host", "device", "time_ns"))
    with contextlib.suppress(OSError):
        (run / STEP_READINGS).rmdir()


def sample_files(run: Path) -> list[Path]:
    """The files of samplers that are no table yet: the launcher's, and those of other hosts."""
    return [file for file in sorted(run.glob(EVERY_SAMPLES)) if file.is_file()]


def write_samples(run: Path) -> None:
    """The readings of samplers as the ``samples`` table."""
    absorb(run, "samples", sample_files(run), ("host", "source", "device", "name", "time_ns"))


def absorb(run: Path, name: str, sources: Sequence[Path], order: Sequence[str]) -> None:
    """The rows of ``sources`` in table ``name``, beside those that it holds; they are removed once it holds them.

    Args:
        order: the columns to sort by.
    """
    if not sources:
        return
    file = run / f"{name}.parquet"
    columns = list(TABLES[name].names)
    present = [read_parquet(file, name)] if file.exists() else []
    # A file whose rows the table holds already is there again where its removal failed.
    table = pa.concat_tables([*present, read_readings(sources, name)]).group_by(columns).aggregate([])
    table = table.sort_by([(column, "ascending") for column in order])
    write_parquet(file, table.select(columns).cast(arrow_schema(name)))
    if len(read_parquet(file, name)) == len(table):
        for source in sources:
            source.unlink(missing_ok=True)


def read_readings(sources: Sequence[Path], name: str = "wire") -> pa.Table:
    """The rows of ``sources`` as table ``name``; a line that was cut off, or is no such row, is left out.

    Raises:
        TraceError: a file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for source in sources:
        rows += _rows_of(source)[0]
    return fitted(name, rows).table


def damaged_lines(run: Path) -> list[str]:
    """A sentence for each file of readings that is no table yet and has lines that :func:`read_readings` leaves out.

    A last line that was cut off while it was written is not counted.

    Raises:
        TraceError: a file cannot be read.
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
    """The rows of a file of readings, and how many lines it has, without a last one that was cut off."""
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
