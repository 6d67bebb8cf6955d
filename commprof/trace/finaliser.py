"""From the binary files of the ranks to Parquet, once nobody writes to them any more.

May be run at any time, again, and by two processes at once; a crash at any point loses nothing. In order: each
rank's collectives are written and read back; the side tables are extended by the ranks that are not in them
yet; the manifest is rewritten; only then are the binary files of those ranks removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from commprof.errors import TraceError
from commprof.trace.decoder import RankTrace, read_rank
from commprof.trace.directory import COLLECTIVES_DIRECTORY, MANIFEST_NAME
from commprof.trace.health import Health, assess
from commprof.trace.layout import EVENTS_SUFFIX, RECORDS_SUFFIX, rank_files
from commprof.trace.manifest import COMPLETE, KILLED, RUNNING, Manifest, read_manifest, write_manifest
from commprof.trace.process import is_alive
from commprof.trace.tables import (
    arrow_schema,
    read_metadata,
    read_parquet,
    write_parquet,
)
from commprof.trace.wire import write_wire

_LOCK_SECONDS: Final = 120
_ENTRY_KEY: Final = b"commprof.rank"
_STEMS_KEY: Final = b"commprof.rank_files"
_SIDE_TABLES: Final = ("groups", "steps", "metrics", "parameters", "buckets", "flight", "clocks")
_QUIET_SECONDS: Final = (
    600  # a file of a host that we cannot ask, untouched for so long, is taken for abandoned
)


def finalise(path: str | os.PathLike[str]) -> Health:
    """Turn what the ranks of run directory ``path`` recorded into Parquet, unless one of them still works.

    Raises:
        TraceError: the directory cannot be written to, or a table cannot be read back as it was written.
        SchemaError: another version wrote it.
    """
    run = Path(path)
    with _locked(run):
        manifest = load_manifest(run)
        traces, damaged = pending_traces(run)
        alive = still_working(run, manifest, traces)
        if not alive:
            _remove_converted(run)
            write_wire(run)
            if traces:
                _convert(run, manifest, traces)
            elif manifest.state == RUNNING and (run / MANIFEST_NAME).exists():
                write_manifest(run, _settled(manifest, []))
        return assess(
            manifest,
            entries_of(manifest, [] if not alive else traces),
            _group_rows(run, traces),
            alive,
            damaged,
        )


def load_manifest(run: Path) -> Manifest:
    """The manifest of ``run``, or one that says what can be known without it."""
    if (run / MANIFEST_NAME).exists():
        manifest = read_manifest(run)
    else:
        files = [file for file in run.rglob("rank-*") if file.is_file()]
        manifest = Manifest(
            started_realtime_ns=min((file.stat().st_mtime_ns for file in files), default=0),
            notes=[
                f"{MANIFEST_NAME} was missing: the command, the environment and the versions are not known"
            ],
        )
    known = {entry.get("file") for entry in manifest.ranks}
    for file in sorted((run / COLLECTIVES_DIRECTORY).glob("rank-*.parquet")):
        if file.stem not in known:
            manifest.ranks.append(entry_of(file))
    return manifest


def entry_of(file: Path) -> dict[str, Any]:
    """The manifest's entry of a rank, from the metadata of its Parquet file."""
    try:
        entry = json.loads(read_metadata(file)[_ENTRY_KEY])
    except (KeyError, ValueError):
        raise TraceError(f"{file} was not written by commprof: it does not say which rank it is") from None
    return dict(entry)


def pending_traces(run: Path) -> tuple[list[RankTrace], list[str]]:
    """The ranks that are not Parquet yet, decoded, and a sentence for each whose files are beyond reading."""
    traces, damaged = [], []
    for identity, stem in rank_files(run):
        if is_finalised(run, stem.name):
            continue
        try:
            traces.append(read_rank(stem))
        except TraceError as error:
            if type(error) is not TraceError:
                raise
            damaged.append(f"rank {identity.rank} (pid {identity.pid}) cannot be read: {error}")
    return traces, damaged


def is_finalised(run: Path, stem: str) -> bool:
    """Whether every table holds what the rank files called ``stem`` hold."""
    if not (run / COLLECTIVES_DIRECTORY / f"{stem}.parquet").exists():
        return False
    return all(stem in stems_in(run, name) for name in _SIDE_TABLES)


def stems_in(run: Path, name: str) -> set[str]:
    """The rank files whose rows table ``name`` holds already."""
    return set(json.loads(read_metadata(run / f"{name}.parquet").get(_STEMS_KEY, b"[]")))


def entries_of(manifest: Manifest, traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """One entry per rank file: those in the manifest and those of ``traces``, which are newer."""
    entries = {(e["rank"], e["attempt"], e["pid"], e.get("part", 1)): e for e in manifest.ranks}
    entries.update({(*trace.identity,): trace.entry for trace in traces})
    return [entries[key] for key in sorted(entries)]


def still_working(run: Path, manifest: Manifest, traces: Sequence[RankTrace]) -> bool:
    """Whether the launcher or a rank of the run still works, so that its files must be left alone."""
    launcher = manifest.launcher
    if (
        manifest.state == RUNNING
        and launcher is not None
        and launcher.get("pid") != os.getpid()
        and is_alive(launcher)
    ):
        return True
    for trace in traces:
        if trace.entry["ended"]:
            continue
        alive = is_alive(trace.begin)
        if alive or (alive is None and _recently_touched(run, trace)):
            return True
    return False


def _recently_touched(run: Path, trace: RankTrace) -> bool:
    newest = 0.0
    for suffix in (RECORDS_SUFFIX, EVENTS_SUFFIX):
        with contextlib.suppress(OSError):
            newest = max(newest, (run / (trace.identity.stem + suffix)).stat().st_mtime)
    return time.time() - newest < _QUIET_SECONDS


def _convert(run: Path, manifest: Manifest, traces: Sequence[RankTrace]) -> None:
    for trace in traces:
        file = run / COLLECTIVES_DIRECTORY / f"{trace.identity.stem}.parquet"
        entry = {**trace.entry, "file": trace.identity.stem}
        write_parquet(file, trace.tables["collectives"], {_ENTRY_KEY: json.dumps(entry).encode()})
        _check_copy(file, trace.tables["collectives"])
    for name in _SIDE_TABLES:
        _extend(run, name, traces)
    ready = [
        RankTrace(t.identity, t.tables, {**t.entry, "file": t.identity.stem}, t.begin, t.config)
        for t in traces
    ]
    write_manifest(run, _settled(manifest, ready))
    _remove_converted(run)


def _remove_converted(run: Path) -> None:
    """Remove the binary files of ranks whose rows all stand in Parquet, those that a crash has left included."""
    for identity, _ in rank_files(run):
        if is_finalised(run, identity.stem):
            for suffix in (RECORDS_SUFFIX, EVENTS_SUFFIX):
                (run / (identity.stem + suffix)).unlink(missing_ok=True)


def _check_copy(file: Path, table: pa.Table) -> None:
    """The binary files are removed for the sake of this copy, so it is read back from the disk and compared."""
    copy = read_parquet(file, "collectives")
    if not copy.equals(table):
        raise TraceError(
            f"{file} does not hold what was written to it ({len(copy)} rows, expected {len(table)}); the binary files "
            "are kept. Check the disk"
        )


def _extend(run: Path, name: str, traces: Sequence[RankTrace]) -> None:
    file = run / f"{name}.parquet"
    present = read_parquet(file, name) if file.exists() else arrow_schema(name).empty_table()
    stems = stems_in(run, name)
    fresh = [trace for trace in traces if trace.identity.stem not in stems]
    if not fresh:
        return
    table = merge(name, [present, *(trace.tables[name] for trace in fresh)])
    stems.update(trace.identity.stem for trace in fresh)
    write_parquet(file, table, {_STEMS_KEY: json.dumps(sorted(stems)).encode()})


def merge(name: str, tables: Sequence[pa.Table]) -> pa.Table:
    """The ranks' tables as one. Of ``parameters``, which all ranks publish alike, the first of each name is kept."""
    schema = arrow_schema(name)
    table = pa.concat_tables([table.replace_schema_metadata(schema.metadata) for table in tables])
    if name != "parameters":
        return table
    seen: set[str] = set()
    keep = []
    for row, parameter in enumerate(table.column("name").to_pylist()):
        if parameter not in seen:
            seen.add(parameter)
            keep.append(row)
    return table.take(pa.array(keep, pa.int64()))


def _settled(manifest: Manifest, traces: Sequence[RankTrace]) -> Manifest:
    """The manifest after the ranks ended: their entries, and what only they knew."""
    manifest.ranks = entries_of(manifest, traces)
    begins = [trace.begin for trace in traces]
    manifest.hosts = sorted({*manifest.hosts, *(str(b["host"]) for b in begins if b.get("host"))})
    worlds = [b["world_size"] for b in begins if isinstance(b.get("world_size"), int)]
    manifest.world_size = max([*worlds, manifest.world_size or 0], default=0) or None
    manifest.torch = manifest.torch or next((b["torch"] for b in begins if b.get("torch")), None)
    for trace in sorted(traces, key=lambda item: item.identity.rank):
        if trace.config is not None and manifest.effective_config is None:
            manifest.effective_config = trace.config.get("config")
            manifest.engine = trace.config.get("engine")
    if manifest.state == RUNNING:
        health = assess(manifest, manifest.ranks, [], alive=False)
        manifest.state = COMPLETE if health.state == COMPLETE else KILLED
        if manifest.ended_realtime_ns is None:
            manifest.ended_realtime_ns = _last_realtime(traces)
    return manifest


def _last_realtime(traces: Sequence[RankTrace]) -> int | None:
    times = [value for trace in traces for value in trace.tables["clocks"].column("realtime_ns").to_pylist()]
    return max(times, default=None)


def _group_rows(run: Path, traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    tables = [trace.tables["groups"] for trace in traces]
    file = run / "groups.parquet"
    if file.exists():
        tables.append(read_parquet(file, "groups"))
    rows: list[dict[str, Any]] = []
    for table in tables:
        rows += table.to_pylist()
    return rows


@contextlib.contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Only one process at a time. The lock is the kernel's, on the directory, so it goes with the process that holds it."""
    try:
        descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TraceError(f"{run} cannot be read: {error.strerror}") from None
    try:
        _lock(run, descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(run: Path, descriptor: int) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TraceError(
                    f"{run} is being finalised by another process for more than {_LOCK_SECONDS} s; try again later"
                ) from None
            time.sleep(0.05)
        except OSError:
            return  # a file system without locks
