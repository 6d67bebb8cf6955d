"""Opens a run: its manifest, health and tables. Writes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from commprof.errors import TraceError
from commprof.schema import SCHEMA_VERSION
from commprof.trace.config_copy import config_note
from commprof.trace.directory import COLLECTIVES_DIRECTORY, elsewhere, resolve
from commprof.trace.fingerprint import Opening, fingerprint
from commprof.trace.health import Health, assess
from commprof.trace.manifest import Manifest
from commprof.trace.pending_ranks import (
    entries_of,
    gone_records,
    is_unfinalised,
    load_manifest,
    locked,
    merge,
    pending_traces,
    require_tables,
    stems_in,
    still_working,
    take_config,
    unseen_rows,
)
from commprof.trace.rank_files.decoder import RankTrace
from commprof.trace.rank_files.layout import EVENTS_SUFFIX, RECORDS_SUFFIX
from commprof.trace.tables import (
    arrow_schema,
    column_parts,
    count_rows,
    parquet_parts,
    read_parquet,
    read_table,
    version_of,
)
from commprof.trace.wire import damaged_lines, read_readings, reading_files, sample_files

_OUR_SUFFIXES: Final = frozenset({".json", ".jsonl", ".parquet", RECORDS_SUFFIX, EVENTS_SUFFIX})
_MOST_ROWS_AT_ONCE: Final = 200_000  # A larger table is returned in several parts.
_MOST_ROWS: Final = 1_000_000  # A larger table is queried in its files, and is not loaded.


class Scan(NamedTuple):
    """The rows of a large table: Parquet files, which a query engine reads in place, and the rows in memory.

    Attributes:
        files: The Parquet files.
        rest: The rows that are not in these files.
        is_current: Whether every file has all columns. If not, some files lack the columns that their older version of
            the schema did not have.
    """

    files: tuple[Path, ...]
    rest: pa.Table
    is_current: bool = True


@dataclass(slots=True)
class Run:
    """An open run. Each table is read at its first use and stays in memory.

    Attributes:
        path: The run directory.
        manifest: The manifest of the run.
        health: The health of the run.
        pending: The traces of ranks that are not in Parquet.
        state: The cache key for results about this run: the key of its fingerprint, unless the run is being written.
    """

    path: Path
    manifest: Manifest
    health: Health
    pending: list[RankTrace]  # These ranks still run, or were not finalized.
    state: str | Opening = field(default_factory=Opening)
    _tables: dict[str, pa.Table] = field(default_factory=dict)

    def table(self, name: str) -> pa.Table:
        """Return table ``name`` with the columns of ``schema.TABLES[name]``. It has no rows if the run has none.

        Raises:
            TraceError: There is no such table, or its file is damaged.
        """
        if name not in self._tables:
            self._tables[name] = self._read(name)
        return self._tables[name]

    def scan(self, name: str, most_rows: int | None = None) -> pa.Table | Scan:
        """Return table ``name`` for a query: the table itself, or a :class:`Scan` of its files if it is large.

        Args:
            name: The name of the table.
            most_rows: The largest number of rows that is loaded. Default: one million.

        Raises:
            TraceError: There is no such table, or its file is damaged.
        """
        if (
            name in ("wire", "samples") or name in self._tables
        ):  # Readings of a running job are not in the Parquet files of these tables.
            return self.table(name)
        files = self._files(name)
        most = _MOST_ROWS if most_rows is None else most_rows
        if sum(map(count_rows, files)) <= most:
            return self.table(name)
        rest = merge(name, [arrow_schema(name).empty_table(), *self._pending(name)])
        scan = scan_of(files, name, rest)
        return self.table(name) if scan is None else scan

    def parts(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of table ``name`` in parts, without keeping them, in the order of :meth:`table`.

        Args:
            name: The name of the table.
            columns: The columns to read. Their texts may be dictionary-encoded. Default: all columns as in
                :meth:`table`.

        Raises:
            TraceError: There is no such table, or its file is damaged.
        """
        wanted = list(columns or arrow_schema(name).names)
        files = [] if name in self._tables else self._files(name)
        if sum(map(count_rows, files)) <= _MOST_ROWS_AT_ONCE:
            yield self.table(name).select(wanted)
            return
        schema = arrow_schema(name)
        for file in files:
            if columns is not None and version_of(file, name) is not None:
                yield from column_parts(file, name, wanted)
                continue
            for part in parquet_parts(file, name):
                yield part.replace_schema_metadata(schema.metadata).select(wanted)
        rest = merge(name, [schema.empty_table(), *self._beside(name), *self._pending(name)])
        yield rest.select(wanted)

    def without_records(self) -> Run:
        """Return the same run with an empty ``collectives`` table, as if its records were not on this machine."""
        none = arrow_schema("collectives").empty_table()
        return replace(self, state=Opening(), _tables={**self._tables, "collectives": none})

    @property
    def nbytes(self) -> int:
        """The size in bytes of the tables in memory."""
        return sum(table.nbytes for table in self._tables.values())

    def without_tables(self) -> Run:
        """Return the same run with only the ``groups`` table in memory, as :func:`open_run` returns it."""
        return replace(self, _tables={"groups": self._tables["groups"]})

    def _read(self, name: str) -> pa.Table:
        schema = arrow_schema(name)
        if name == "collectives":
            tables = [read_parquet(file, name) for file in self._collective_files()]
        else:
            require_tables(self.path, self.manifest, name)
            tables = [read_table(self.path, name)]
        return merge(name, [schema.empty_table(), *tables, *self._beside(name), *self._pending(name)])

    def _beside(self, name: str) -> list[pa.Table]:
        """Return the readings that are not in Parquet yet because the run was not finalized."""
        if name == "wire":
            return [read_readings(reading_files(self.path))]
        return [read_readings(sample_files(self.path), name)] if name == "samples" else []

    def _files(self, name: str) -> list[Path]:
        require_tables(self.path, self.manifest, name)
        files = self._collective_files() if name == "collectives" else [self.path / f"{name}.parquet"]
        return [file for file in files if file.exists()]

    def _collective_files(self) -> list[Path]:
        there = elsewhere(self.path)
        if there is not None:
            raise TraceError(
                f"this needs every record of {self.path}, and the records are at "
                f"{there.place}/{COLLECTIVES_DIRECTORY}; copy or mount that directory as "
                f"{self.path / COLLECTIVES_DIRECTORY}"
            )
        pending = {trace.identity.stem for trace in self.pending}
        files = sorted((self.path / COLLECTIVES_DIRECTORY).glob("rank-*.parquet"))
        return [file for file in files if file.stem not in pending]

    def _pending(self, name: str) -> list[pa.Table]:
        """Return the rows of the ranks that are not in Parquet."""
        if name == "collectives":
            return [trace.collectives() for trace in self.pending]
        finalised_stems = stems_in(self.path, name) if self.pending else set()
        return [
            t.tables[name]
            for t in self.pending
            if name in t.tables and t.identity.stem not in finalised_stems
        ]


def scan_of(files: Sequence[Path], name: str, rest: pa.Table) -> Scan | None:
    """Return a scan of ``files`` of table ``name`` and of ``rest``. Return None if a file must be converted.

    Raises:
        TraceError: A file is damaged.
    """
    versions = {version_of(file, name) for file in files}
    return None if None in versions else Scan(tuple(files), rest, versions == {SCHEMA_VERSION})


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open run directory ``path``, or ``latest``.

    The function writes nothing. Ranks that were not finalized (:mod:`commprof.trace.finaliser`) are decoded in memory.
    For a finalized run, only the manifest and the ``groups`` table are read. Other tables are read at their first use.

    Raises:
        TraceError: There is no run at ``path``, or nothing in the run can be read.
        SchemaError: A newer version wrote the run.
    """
    run = resolve(os.fspath(path))
    before = fingerprint(run)
    try:
        # The lock ensures that all files are from before a concurrent finalization, or all are from after it.
        with locked(run, fcntl.LOCK_SH) if is_unfinalised(run) else contextlib.nullcontext():
            manifest = load_manifest(run)
            traces, damaged = pending_traces(run)
    except OSError as error:
        raise TraceError(f"{run} cannot be read: {error.strerror}") from None
    if damaged and not traces and not manifest.ranks:
        raise TraceError(f"{run} cannot be read: {'; '.join(damaged)}")
    alive = still_working(run, manifest, traces)
    gone = gone_records(run, manifest)
    damaged += gone.values()
    opened = Run(run, manifest, _unknown_health(manifest), traces)
    if before.is_still:
        opened.state = before.key
    entries = entries_of(manifest, traces)
    opened.health = assess(manifest, entries, unseen_rows(opened.table("groups")), alive, damaged, gone)
    edited = config_note(run, manifest.config)
    unread = [] if alive else damaged_lines(run)
    beside = [*unread, *_irregular(run), *([edited] if edited else [])]
    opened.health = replace(opened.health, notes=(*opened.health.notes, *beside))
    _fill_in(manifest, traces)
    manifest.ranks = entries
    return opened


def _unknown_health(manifest: Manifest) -> Health:
    return assess(manifest, [], [], alive=False)


def _irregular(run: Path) -> list[str]:
    """Return a sentence for each pipe, device or directory whose name has the suffix of a commprof file."""
    return [
        f"{path.name} is no regular file, and was not read"
        for path in sorted(run.iterdir())
        if path.suffix in _OUR_SUFFIXES and not path.name.startswith(".") and not path.is_file()
    ]


def _fill_in(manifest: Manifest, traces: list[RankTrace]) -> None:
    """Fill in manifest values that, before finalization, are only in the files of the ranks."""
    if manifest.world_size is None:
        manifest.world_size = max((trace.entry["world_size"] or 0 for trace in traces), default=0) or None
    if not manifest.hosts:
        manifest.hosts = sorted({trace.entry["host"] for trace in traces if trace.entry["host"]})
    take_config(manifest, traces)
