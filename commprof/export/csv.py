"""A run as CSV files: one per table, a data dictionary, and where it all came from."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import pyarrow as pa

from commprof import __version__
from commprof.analysis.api import AnyRun, Run, open_run, write_csv
from commprof.errors import TraceError, UsageError
from commprof.schema import SCHEMA_VERSION, TABLES

DICTIONARY: Final = "data_dictionary.csv"
PROVENANCE: Final = "provenance.json"


class ExportedFile(NamedTuple):
    """One file of an export. ``rows`` is without the header, None for a file that is no table."""

    path: Path
    rows: int | None
    bytes: int
    sha256: str


class _Sink:
    """A file that is written once, and counted and hashed on the way."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self.stream.write(data)

    def flush(self) -> None:
        self.stream.flush()


def export_csv(
    run: AnyRun, out: Path | str, tables: Sequence[str] | None = None, force: bool = False
) -> list[ExportedFile]:
    """Write ``<table>.csv`` for each of ``tables``, ``data_dictionary.csv`` and ``provenance.json`` into directory ``out``.

    A table that the run has nothing of gives a file with its header. Every file is written under another name
    first; they take their names together at the end, so a failure leaves what was there before.

    Args:
        run: the run, or its path.
        out: directory to write to; made where it is missing.
        tables: names of tables of the schema; default all.
        force: write into a directory that holds something; only files of the names above are replaced.

    Raises:
        UsageError: an unknown table; ``out`` is no directory, or holds something and ``force`` is off.
        TraceError: the run cannot be read, or ``out`` cannot be written to.
    """
    names = _table_names(tables)
    opened = open_run(run) if isinstance(run, str | Path) else run
    out = Path(out)
    targets = [out / f"{name}.csv" for name in names] + [out / DICTIONARY, out / PROVENANCE]
    _check_target(out, targets, force)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _staging(out) as staging:
            files = [_write_table(staging / f"{name}.csv", opened.table(name)) for name in names]
            files.append(_write_table(staging / DICTIONARY, data_dictionary(names)))
            content = json.dumps(provenance(opened, files), indent=2) + "\n"
            files.append(_write(staging / PROVENANCE, lambda sink: sink.write(content.encode("utf-8")), None))
            for file in files:
                file.path.replace(out / file.path.name)
    except OSError as error:
        raise TraceError(
            f"{error.filename or out} cannot be written: {error.strerror or error}. Nothing was replaced; choose "
            "another --out, or make room there"
        ) from error
    return [file._replace(path=out / file.path.name) for file in files]


def _table_names(tables: Sequence[str] | None) -> list[str]:
    names = list(dict.fromkeys(TABLES if tables is None else tables))
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise UsageError(
            f"there is no table {', '.join(map(repr, unknown))}; the tables are: {', '.join(TABLES)}"
        )
    return names


def _check_target(out: Path, targets: Sequence[Path], force: bool) -> None:
    try:
        if not out.exists():
            return
        if not out.is_dir():
            raise UsageError(f"{out} is a file; an export needs a directory. Choose another --out")
        if not force and any(out.iterdir()):
            raise UsageError(
                f"{out} is not empty, and an export would not overwrite it unasked. Choose another --out, or use --force: "
                f"it replaces the files of an export ({targets[0].name}, ...) and leaves the rest"
            )
    except PermissionError:
        raise UsageError(f"{out} cannot be read: permission denied. Choose another --out") from None
    blocked = [target for target in targets if target.is_dir()]
    if blocked:
        raise UsageError(f"{blocked[0]} is a directory where a file is to be written. Choose another --out")


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A directory inside ``out``, so that its files can be renamed into place; gone afterwards."""
    with tempfile.TemporaryDirectory(dir=out, prefix=".export-") as directory:
        yield Path(directory)


def _write(path: Path, fill: Callable[[Any], Any], rows: int | None) -> ExportedFile:
    with path.open("wb") as stream:
        sink = _Sink(stream)
        fill(sink)
        stream.flush()
        os.fsync(stream.fileno())
    return ExportedFile(path, rows, sink.bytes, sink.digest.hexdigest())


def _write_table(path: Path, table: pa.Table) -> ExportedFile:
    return _write(path, lambda sink: write_csv(table, sink), table.num_rows)


def data_dictionary(names: Sequence[str]) -> pa.Table:
    """One row per column of each table: table, column, type, unit, nullable, values, description."""
    return pa.Table.from_pylist(
        [
            {
                "table": name,
                "column": column.name,
                "type": column.type,
                "unit": column.unit or None,
                "nullable": column.nullable,
                "values": ";".join(column.values) or None,
                "description": column.doc,
            }
            for name in names
            for column in TABLES[name].columns
        ],
        schema=pa.schema(
            [
                *((name, pa.string()) for name in ("table", "column", "type", "unit")),
                ("nullable", pa.bool_()),
                ("values", pa.string()),
                ("description", pa.string()),
            ]
        ),
    )


def provenance(run: Run, files: Sequence[ExportedFile]) -> dict[str, Any]:
    """Where the files came from: what ran, with what, what is missing, and a checksum of each."""
    manifest, health = run.manifest, run.health
    return {
        "schema_version": SCHEMA_VERSION,
        "exported_by": f"commprof {__version__}",
        "run": {
            "name": run.path.name,
            "recorded_by": f"commprof {manifest.commprof_version}",
            "schema_version": manifest.schema_version,
            "state": health.state,
            "command": list(manifest.command),
            "script": manifest.script,
            "started_realtime_ns": manifest.started_realtime_ns,
            "ended_realtime_ns": manifest.ended_realtime_ns,
            "exit_code": manifest.exit_code,
            "first_failed_rank": manifest.first_failed_rank,
            "world_size": manifest.world_size,
            "hosts": list(manifest.hosts),
            "python": manifest.python,
            "torch": manifest.torch,
            "platform": manifest.platform,
            "environment": dict(manifest.environment),
            "config": manifest.config,
            "sweep": manifest.sweep,
        },
        "health": {
            "records": health.records,
            "lost": health.lost,
            "unseen": health.unseen,
            "torn": health.torn,
            "raised": health.raised,
            "incomplete": health.incomplete,
            "ranks_expected": health.ranks_expected,
            "ranks_recorded": health.ranks_recorded,
            "missing_ranks": list(health.missing_ranks),
            "notes": list(health.notes),
        },
        "files": [
            {"name": file.path.name, "rows": file.rows, "bytes": file.bytes, "sha256": file.sha256}
            for file in files
        ],
    }
