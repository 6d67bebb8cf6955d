"""Converts the binary files of the ranks to Parquet once no process writes to them any more.

It may run at any time, repeatedly, and in two processes at once. A crash at any point loses no data, because the
finalizer works in this order:

1. It writes the collectives of each rank and reads them back.
2. It adds the rows of the ranks that are not in the side tables yet.
3. It rewrites the manifest.
4. It removes the binary files of these ranks.

Records are read and written in parts, so memory use does not grow with their number.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from commprof.errors import SchemaError, TraceError
from commprof.trace.collective_files import remove_partial, write_collectives
from commprof.trace.directory import COLLECTIVES_DIRECTORY, MANIFEST_NAME, STACKS_DIRECTORY
from commprof.trace.health import Health, assess
from commprof.trace.liveness import host_of
from commprof.trace.manifest import COMPLETE, KILLED, RUNNING, Manifest, write_manifest
from commprof.trace.pending_ranks import (
    ENTRY_KEY,
    SIDE_TABLES,
    STEMS_KEY,
    beside_each_other,
    collectives_file,
    entries_of,
    finalised_stems,
    gone_records,
    is_unfinalised,
    launcher_works,
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
from commprof.trace.process import is_alive
from commprof.trace.rank_files.decoder import RankTrace, read_rank
from commprof.trace.rank_files.layout import EVENTS_SUFFIX, RECORDS_SUFFIX, rank_files
from commprof.trace.tables import arrow_schema, read_metadata, read_parquet, write_parquet
from commprof.trace.wire import damaged_lines, reading_files, sample_files, write_samples, write_wire

_OUTSIDE_KEY: Final = b"commprof.outside"
_MOST_THREADS: Final = 4  # Each thread keeps one part of a rank's records in memory.


def finalise(path: str | os.PathLike[str]) -> Health:
    """Convert the recordings of all ranks in run directory ``path`` to Parquet, unless a process still records.

    Returns:
        The health of the run.

    Raises:
        TraceError: The directory cannot be written to, or a table differs when it is read back.
        SchemaError: An incompatible version wrote the run.
    """
    run = Path(path)
    with locked(run, fcntl.LOCK_EX) as alone:
        if alone:
            _remove_leftovers(run)
        manifest = load_manifest(run)
        traces, damaged = pending_traces(run)
        alive = still_working(run, manifest, traces)
        if not alive:
            _remove_converted(run)
            is_read = bool(reading_files(run) or sample_files(run))
            manifest.notes = list(dict.fromkeys([*manifest.notes, *damaged_lines(run)]))
            write_wire(run)
            write_samples(run)
            _remove_unused_stacks(run)
            if traces:
                _convert(run, manifest, traces)
            elif (is_read or manifest.state == RUNNING) and (run / MANIFEST_NAME).exists():
                write_manifest(run, _settled(run, manifest, []))
        gone = gone_records(run, manifest)
        return assess(
            manifest,
            entries_of(manifest, [] if not alive else traces),
            _group_rows(run, traces),
            alive,
            [*damaged, *gone.values()],
            gone,
        )


def convert_host(path: str | os.PathLike[str], host: str) -> list[RankTrace]:
    """Write the records of the ranks of ``host`` as Parquet if the run has several hosts and these ranks have ended.

    The launchers of all hosts call this function at the same time. One launcher then runs :func:`finalise` for the
    whole job, and does not write these files again.

    Returns:
        The traces of the converted ranks. The list is empty if there was nothing to do.

    Raises:
        TraceError: A file cannot be read or written.
        SchemaError: An incompatible version wrote the run.
    """
    run = Path(path)
    with locked(run, fcntl.LOCK_SH):  # A process that finalizes the run must wait.
        hosts = {stem: host_of(stem) for _, stem in rank_files(run)}
        mine = [stem for stem in hosts if hosts[stem] == host]
        if not mine or len(set(hosts.values())) < 2:
            return []
        traces = beside_each_other(run, [read_rank(stem) for stem in mine])
        if any(not trace.entry["ended"] and is_alive(trace.begin) for trace in traces):
            return []
        entries = _write_ranks(run, traces)
    return [replace(trace, entry=entry) for trace, entry in zip(traces, entries, strict=True)]


def finalise_ended(path: str | os.PathLike[str]) -> Health | None:
    """Finalize run ``path`` if it has ended and is not finalized. Commands call this before they read a run.

    Returns:
        The health of the run. None if the run is already finalized, still records, is damaged, or cannot be written to.

    Raises:
        TraceError: The directory of the run cannot be read.
        SchemaError: A newer version wrote the run.
    """
    run = Path(path)
    try:
        if not is_unfinalised(run) or launcher_works(load_manifest(run)):
            return None
    except OSError as error:
        raise TraceError(f"{run} cannot be read: {error.strerror}") from None
    try:
        health = finalise(run)
    except SchemaError:
        raise
    except TraceError:
        return None  # The run cannot be written to, so it is read as it is.
    return None if is_unfinalised(run) else health


def _convert(run: Path, manifest: Manifest, traces: Sequence[RankTrace]) -> None:
    entries = _write_ranks(run, traces)
    require_tables(run, manifest, *SIDE_TABLES)
    for name in SIDE_TABLES:
        _extend(run, name, traces)
    ready = [replace(trace, entry=entry) for trace, entry in zip(traces, entries, strict=True)]
    write_manifest(run, _settled(run, manifest, ready))
    for directory in (run / COLLECTIVES_DIRECTORY, run):
        _sync(directory)
    _remove_converted(run)


def _write_ranks(run: Path, traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    # Compression and comparison release the GIL, so threads can share the work.
    with ThreadPoolExecutor(min(len(traces), len(os.sched_getaffinity(0)), _MOST_THREADS)) as pool:
        return list(pool.map(lambda trace: _write_rank(run, trace), traces))


def _write_rank(run: Path, trace: RankTrace) -> dict[str, Any]:
    """Write the collectives of one rank, unless the launcher of its host wrote them. Return its manifest entry."""
    entry = {**trace.entry, "file": trace.identity.stem}
    file = collectives_file(run, trace.identity.stem)
    # The rows depend on the evaluations of other ranks, too.
    outside = json.dumps(sorted(trace.outside.items()))
    metadata = {ENTRY_KEY: json.dumps(entry).encode(), _OUTSIDE_KEY: outside.encode()}
    if not _holds(file, metadata):
        write_collectives(file, trace.parts, metadata)
    return entry


def _holds(file: Path, metadata: Mapping[bytes, bytes]) -> bool:
    """Return whether ``file`` exists and has this ``metadata``. A file that exists is complete."""
    try:
        return metadata.items() <= read_metadata(file).items()
    except TraceError:
        return False


def _sync(directory: Path) -> None:
    """Write the entries of ``directory`` to the disk, so that new files are durable before old files are removed."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_converted(run: Path) -> None:
    """Remove the binary files of ranks whose rows are all in Parquet, including files that remained after a crash."""
    done = finalised_stems(run)
    for identity, stem in rank_files(run):
        if stem.name in done:
            for suffix in (RECORDS_SUFFIX, EVENTS_SUFFIX):
                (run / (identity.stem + suffix)).unlink(missing_ok=True)


def _remove_leftovers(run: Path) -> None:
    """Remove temporary files of commands that were killed while they finalized. No other code uses these names."""
    remove_partial(run / COLLECTIVES_DIRECTORY)
    for name in (*SIDE_TABLES, "wire"):
        for file in run.glob(f".{name}.parquet-*"):
            file.unlink(missing_ok=True)


def _remove_unused_stacks(run: Path) -> None:
    """Remove the empty stack files: no stacks were requested from these processes."""
    directory = run / STACKS_DIRECTORY
    with contextlib.suppress(OSError):
        for file in directory.glob("rank-*.txt"):
            if not file.stat().st_size:
                file.unlink()
        directory.rmdir()


def _extend(run: Path, name: str, traces: Sequence[RankTrace]) -> None:
    file = run / f"{name}.parquet"
    present = read_parquet(file, name) if file.exists() else arrow_schema(name).empty_table()
    stems = stems_in(run, name)
    fresh = [trace for trace in traces if trace.identity.stem not in stems]
    if not fresh:
        return
    table = merge(name, [present, *(trace.tables[name] for trace in fresh)])
    stems.update(trace.identity.stem for trace in fresh)
    write_parquet(file, table, {STEMS_KEY: json.dumps(sorted(stems)).encode()})


def _settled(run: Path, manifest: Manifest, traces: Sequence[RankTrace]) -> Manifest:
    """Complete ``manifest`` after the ranks ended: entries of ranks, tables, and values that only ranks record."""
    manifest.ranks = entries_of(manifest, traces)
    written = {name for name in (*SIDE_TABLES, "wire", "samples") if (run / f"{name}.parquet").exists()}
    manifest.tables = sorted({*(manifest.tables or ()), *written})
    begins = [trace.begin for trace in traces]
    manifest.hosts = sorted({*manifest.hosts, *(str(b["host"]) for b in begins if b.get("host"))})
    worlds = [t.entry["world_size"] for t in traces if t.entry["world_size"] is not None]
    manifest.world_size = max([*worlds, manifest.world_size or 0], default=0) or None
    manifest.torch = manifest.torch or next((str(b["torch"]) for b in begins if b.get("torch")), None)
    take_config(manifest, traces)
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
        rows += unseen_rows(table)
    return rows
