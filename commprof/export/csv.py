"""Exports runs as CSV files: one per table, the comparison, a data dictionary, and the provenance."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final, cast

import pyarrow as pa

from commprof.analysis.api import AnyRun, write_csv, write_csv_parts
from commprof.errors import TraceError
from commprof.export.export_tables import (
    COMPARISON,
    COMPARISONS,
    ExportedTable,
    comparison_of,
    exported_tables,
    opened_runs,
    table_names,
    tables_of,
)
from commprof.export.files import ExportedFile, Progress, Sink, staged
from commprof.export.provenance import DICTIONARY, PROVENANCE, data_dictionary, provenance_text
from commprof.printable import command_line

_BLOCK: Final = 1 << 20


def export_csv(
    run: AnyRun | Sequence[AnyRun],
    out: Path | str,
    tables: Sequence[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    empty: bool = False,
) -> list[ExportedFile]:
    """Write CSV files of the tables and the comparison, a data dictionary and ``provenance.json`` into ``out``.

    The file of a table is ``<table>.csv``.

    For several runs each table begins with the column ``run``. All files are written under temporary names and renamed
    together at the end. If the export fails, the files of an earlier export remain.

    Args:
        run: The run or runs, or their paths.
        out: The directory to write to. It is created if it does not exist.
        tables: The names of tables of the schema, without the comparison. By default all tables with rows and the
            comparison are exported.
        force: Whether to write into a directory that is not empty. Only files with the names above are replaced.
        progress: A function that is called with the name of each file before the file is written.
        empty: Whether to write tables without rows too, as a header alone.

    Raises:
        UsageError: A table is unknown, or ``out`` is not a directory, or is not empty and ``force`` is off.
        TraceError: A run cannot be read, or ``out`` cannot be written to.
    """
    names = table_names(tables)
    runs = opened_runs(run)
    compared = COMPARISONS if tables is None else ()
    targets = [*(f"{name}.csv" for name in (*names, *compared)), DICTIONARY, PROVENANCE]
    with staged(Path(out), targets, force, progress) as staging:
        described = []
        for table in exported_tables(runs, tables, empty):
            described.append((table.name, table.columns))
            staging.write_rows(f"{table.name}.csv", table.batches(), partial(_write, table))
        dictionary = data_dictionary(described)
        staging.write(DICTIONARY, partial(write_csv, dictionary), len(dictionary))
        staging.write_text(PROVENANCE, provenance_text(runs, staging.files))
    return staging.files


def _write(table: ExportedTable, batches: Iterator[pa.Table], out: IO[bytes]) -> None:
    write_csv_parts(batches, table.schema, out)


def check_csv(out: Path | str, run: AnyRun | Sequence[AnyRun]) -> list[str]:
    """Return a sentence for each difference between the CSV files in ``out`` and the runs that they were exported from.

    The size and checksum of each file must be those in ``provenance.json``. Each table must be equal, byte for byte, to
    the table that an export of the runs writes now.

    Raises:
        TraceError: ``out`` contains no export.
    """
    out = Path(out)
    try:
        written = json.loads((out / PROVENANCE).read_text("utf-8"))
        listed = {str(entry["name"]): entry for entry in written["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise TraceError(
            f"{out} holds no export: its {PROVENANCE} cannot be read. Make one: "
            f"{command_line('export', 'RUN', '--out', out)}"
        ) from None
    runs = opened_runs(run)
    problems = [problem for name, entry in listed.items() if (problem := _unlike(out / name, entry))]
    wanted = [name.removesuffix(".csv") for name in listed if name.endswith(".csv") and name != DICTIONARY]
    exported = tables_of(runs, table_names([name for name in wanted if name not in COMPARISONS]))
    for table in chain(exported, comparison_of(runs) if COMPARISON in wanted else ()):
        file = out / f"{table.name}.csv"
        if table.name not in wanted and not table.has_rows():
            continue
        with tempfile.TemporaryFile() as text:
            sink = Sink(text)
            write_csv_parts(table.batches(), table.schema, cast(IO[bytes], sink))
            if sink.digest.hexdigest() != _digest(file):
                problems.append(f"{file.name} differs from the run: {_first_difference(file, text)}")
    return problems


def _unlike(file: Path, entry: dict[str, Any]) -> str | None:
    if not file.exists():
        return f"{file.name} is missing"
    size = file.stat().st_size
    if size != entry.get("bytes"):
        return f"{file.name} has {size:,} bytes, {PROVENANCE} says {entry.get('bytes'):,}"
    if _digest(file) != entry.get("sha256"):
        return f"{file.name} was changed after the export: its checksum is not that of {PROVENANCE}"
    return None


def _digest(file: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


def _first_difference(file: Path, expected: IO[bytes]) -> str:
    """Return a description of the first difference between the rows of the two files."""
    expected.seek(0)
    wanted = io.TextIOWrapper(expected, "utf-8", newline="")
    try:
        with file.open(encoding="utf-8", newline="") as actual:
            return _parting(csv.reader(actual), csv.reader(wanted))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        return f"it cannot be read ({error})"
    finally:
        wanted.detach()


def _parting(mine: Iterator[list[str]], theirs: Iterator[list[str]]) -> str:
    head = next(theirs, [])
    if next(mine, []) != head:
        return "its columns are others"
    number = 0
    while True:
        number += 1
        a, b = next(mine, None), next(theirs, None)
        if a is None and b is None:
            return "the values are equal, but they are formatted differently"
        if a is None or b is None:
            return f"it has {'fewer' if a is None else 'more'} rows, from row {number:,} on"
        if a != b:
            column = next((head[i] for i in range(min(len(a), len(b))) if a[i] != b[i]), "?")
            place = head.index(column) if column in head else 0
            return f"row {number:,}, column {column}: {a[place]!r} where the run has {b[place]!r}"
