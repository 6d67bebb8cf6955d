"""Opening a run: what it is, how whole it is, and its tables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from commprof.errors import SchemaError, TraceError
from commprof.trace.decoder import RankTrace
from commprof.trace.directory import COLLECTIVES_DIRECTORY, resolve
from commprof.trace.finaliser import (
    entries_of,
    finalise,
    load_manifest,
    merge,
    pending_traces,
    stems_in,
    still_working,
)
from commprof.trace.health import Health, assess
from commprof.trace.layout import rank_files
from commprof.trace.manifest import Manifest
from commprof.trace.tables import arrow_schema, read_parquet, read_table
from commprof.trace.wire import read_readings, reading_files


@dataclass(slots=True)
class Run:
    """A run that was opened. Tables are read when asked for and kept."""

    path: Path
    manifest: Manifest
    health: Health
    pending: list[
        RankTrace
    ]  # ranks that are not Parquet: still running, or in a directory that cannot be written to
    _tables: dict[str, pa.Table] = field(default_factory=dict)

    def table(self, name: str) -> pa.Table:
        """Table ``name``, conforming to ``schema.TABLES[name]``; without rows when the run has none.

        Raises:
            TraceError: there is no such table, or its file is damaged.
        """
        if name not in self._tables:
            self._tables[name] = self._read(name)
        return self._tables[name]

    def _read(self, name: str) -> pa.Table:
        schema = arrow_schema(name)
        if name == "collectives":
            pending = {trace.identity.stem for trace in self.pending}
            files = sorted((self.path / COLLECTIVES_DIRECTORY).glob("rank-*.parquet"))
            tables = [read_parquet(file, name) for file in files if file.stem not in pending]
        else:
            tables = [read_table(self.path, name)]
        if name == "wire":
            tables.append(read_readings(reading_files(self.path)))
        held = stems_in(self.path, name) if name != "collectives" else set()
        tables += [t.tables[name] for t in self.pending if name in t.tables and t.identity.stem not in held]
        return merge(name, [schema.empty_table(), *tables])


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open run directory ``path``, or ``latest``.

    Binary files of ranks that have ended are finalised first. A run that still works is read as it is and left
    alone; so is one whose directory cannot be written to.

    Raises:
        TraceError: there is no run at ``path``, or nothing in it can be read.
        SchemaError: a newer version wrote it.
    """
    run = resolve(os.fspath(path))
    try:
        has_rank_files = bool(rank_files(run))
    except OSError as error:
        raise TraceError(f"{run} cannot be read: {error.strerror}") from None
    manifest = load_manifest(run)
    if has_rank_files or reading_files(run):
        try:
            finalise(run)
            manifest = load_manifest(run)
        except SchemaError:
            raise
        except TraceError:
            pass  # not ours to write to: what is there is read below
    traces, damaged = pending_traces(run)
    if damaged and not traces and not manifest.ranks:
        raise TraceError(f"{run} cannot be read: {'; '.join(damaged)}")
    alive = still_working(run, manifest, traces)
    opened = Run(run, manifest, _unknown_health(manifest), traces)
    entries = entries_of(manifest, traces)
    opened.health = assess(manifest, entries, opened.table("groups").to_pylist(), alive, damaged)
    _fill_in(manifest, traces)
    manifest.ranks = entries
    return opened


def _unknown_health(manifest: Manifest) -> Health:
    return assess(manifest, [], [], alive=False)


def _fill_in(manifest: Manifest, traces: list[RankTrace]) -> None:
    """What only the ranks of a run that was not finalised know."""
    begins: list[dict[str, Any]] = [trace.begin for trace in traces]
    if manifest.world_size is None:
        manifest.world_size = max(
            (b["world_size"] for b in begins if isinstance(b.get("world_size"), int)), default=None
        )
    if not manifest.hosts:
        manifest.hosts = sorted({str(b["host"]) for b in begins if b.get("host")})
    for trace in traces:
        if trace.config is not None and manifest.effective_config is None:
            manifest.effective_config = trace.config.get("config")
            manifest.engine = trace.config.get("engine")
