"""From the binary files of the ranks to Parquet, once nobody writes to them any more.

May be run at any time, again, and by two processes at once; a crash at any point loses nothing. In order: each
rank's collectives are written and read back; the side tables are extended by the ranks that are not in them
yet; the manifest is rewritten; only then are the binary files of those ranks removed. Records are read and written
some at a time, so memory does not grow with their number.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from commprof.errors import TraceError
from commprof.trace.collective_files import remove_partial, write_collectives
from commprof.trace.decoder import RankTrace, read_rank
from commprof.trace.directory import COLLECTIVES_DIRECTORY, MANIFEST_NAME, STACKS_DIRECTORY
from commprof.trace.health import Health, assess
from commprof.trace.layout import EVENTS_SUFFIX, RECORDS_SUFFIX, rank_files
from commprof.trace.liveness import recently_touched
from commprof.trace.manifest import (
    COMPLETE,
    KILLED,
    RUNNING,
    Manifest,
    read_manifest,
    write_manifest,
    wrong_entry,
)
from commprof.trace.process import is_alive
from commprof.trace.tables import (
    arrow_schema,
    read_metadata,
    read_parquet,
    write_parquet,
)
from commprof.trace.wire import write_samples, write_wire

_LOCK_SECONDS: Final = 120
_MOST_THREADS: Final = 4  # each holds one part of a rank's records
_ENTRY_KEY: Final = b"commprof.rank"
_STEMS_KEY: Final = b"commprof.rank_files"
_SIDE_TABLES: Final = (
    "groups",
    "steps",
    "outside_steps",
    "metrics",
    "parameters",
    "wrappers",
    "wrapper_passes",
    "buckets",
    "stalls",
    "flight",
    "clocks",
    "clock_offsets",
    "aggregates",
)


def finalise(path: str | os.PathLike[str]) -> Health:
    """Turn what the ranks of run directory ``path`` recorded into Parquet, unless one of them still works.

    Raises:
        TraceError: the directory cannot be written to, or a table cannot be read back as it was written.
        SchemaError: another version wrote it.
    """
    run = Path(path)
    with _locked(run) as alone:
        if alone:
            _remove_leftovers(run)
        manifest = load_manifest(run)
        traces, damaged = pending_traces(run)
        alive = still_working(run, manifest, traces)
        if not alive:
            _remove_converted(run)
            write_wire(run)
            write_samples(run)
            _remove_unused_stacks(run)
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
        entry: dict[str, Any] = json.loads(read_metadata(file)[_ENTRY_KEY])
    except (KeyError, ValueError, RecursionError):
        raise TraceError(f"{file} was not written by commprof: it does not say which rank it is") from None
    problem = wrong_entry(entry)
    if problem is not None:
        raise TraceError(f"{file} is damaged: {problem}")
    return entry


def pending_traces(run: Path) -> tuple[list[RankTrace], list[str]]:
    """The ranks that are not Parquet yet, decoded, and a sentence for each whose files are beyond reading."""
    traces, damaged = [], []
    done = finalised_stems(run)
    for identity, stem in rank_files(run):
        if stem.name in done:
            continue
        try:
            traces.append(read_rank(stem))
        except TraceError as error:
            if type(error) is not TraceError:
                raise
            damaged.append(f"rank {identity.rank} (pid {identity.pid}) cannot be read: {error}")
    return [_with_others(run, trace, traces) for trace in traces], damaged


def _with_others(run: Path, trace: RankTrace, traces: Sequence[RankTrace]) -> RankTrace:
    """``trace`` as it reads beside the others: what is outside of the steps of one rank is so of all."""
    elsewhere: dict[int, str] = {}
    for other in traces:
        if other.identity.attempt == trace.identity.attempt:
            elsewhere = other.outside | elsewhere
    if elsewhere.keys() <= trace.outside.keys():
        return trace
    return read_rank(run / trace.identity.stem, elsewhere)


def finalised_stems(run: Path) -> set[str]:
    """The rank files of which every table holds all."""
    if not rank_files(run):
        return set()
    stems = {file.stem for file in (run / COLLECTIVES_DIRECTORY).glob("rank-*.parquet")}
    for name in _SIDE_TABLES if stems else ():
        stems &= stems_in(run, name)
    return {stem for stem in stems if entry_of(_collectives_file(run, stem)).get("file") == stem}


def _collectives_file(run: Path, stem: str) -> Path:
    return run / COLLECTIVES_DIRECTORY / f"{stem}.parquet"


def stems_in(run: Path, name: str) -> set[str]:
    """The rank files whose rows table ``name`` holds already."""
    file = run / f"{name}.parquet"
    try:
        return set(json.loads(read_metadata(file).get(_STEMS_KEY, b"[]")))
    except (ValueError, TypeError):
        raise TraceError(f"{file} is damaged: the list of the ranks that it holds cannot be read") from None


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
        if alive or (alive is None and recently_touched(run / trace.identity.stem)):
            return True
    return False


def _convert(run: Path, manifest: Manifest, traces: Sequence[RankTrace]) -> None:
    # Compressing and comparing release the interpreter's lock, so threads share the work.
    with ThreadPoolExecutor(min(len(traces), len(os.sched_getaffinity(0)), _MOST_THREADS)) as pool:
        entries = list(pool.map(lambda trace: _write_rank(run, trace), traces))
    for name in _SIDE_TABLES:
        _extend(run, name, traces)
    ready = [replace(trace, entry=entry) for trace, entry in zip(traces, entries, strict=True)]
    write_manifest(run, _settled(manifest, ready))
    for directory in (run / COLLECTIVES_DIRECTORY, run):
        _sync(directory)
    _remove_converted(run)


def _write_rank(run: Path, trace: RankTrace) -> dict[str, Any]:
    """Write one rank's collectives; its entry in the manifest, which names the file."""
    entry = {**trace.entry, "file": trace.identity.stem}
    file = _collectives_file(run, trace.identity.stem)
    write_collectives(file, trace.parts, {_ENTRY_KEY: json.dumps(entry).encode()})
    return entry


def _sync(directory: Path) -> None:
    """The names of new files reach the disk before the old files go."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_converted(run: Path) -> None:
    """Remove the binary files of ranks whose rows all stand in Parquet, those that a crash has left included."""
    done = finalised_stems(run)
    for identity, stem in rank_files(run):
        if stem.name in done:
            for suffix in (RECORDS_SUFFIX, EVENTS_SUFFIX):
                (run / (identity.stem + suffix)).unlink(missing_ok=True)


def _remove_leftovers(run: Path) -> None:
    """Remove what commands left that were killed while they finalised. Only they write under these names."""
    remove_partial(run / COLLECTIVES_DIRECTORY)
    for name in (*_SIDE_TABLES, "wire"):
        for file in run.glob(f".{name}.parquet-*"):
            file.unlink(missing_ok=True)


def _remove_unused_stacks(run: Path) -> None:
    """Remove the files in which no process was asked for its stacks."""
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
    write_parquet(file, table, {_STEMS_KEY: json.dumps(sorted(stems)).encode()})


def merge(name: str, tables: Sequence[pa.Table]) -> pa.Table:
    """The ranks' tables as one. Of ``parameters``, which all ranks publish alike, the first of each name is kept.

    Stages of a pipeline have others each; of one that several have, all are named.
    """
    schema = arrow_schema(name)
    table = pa.concat_tables([table.replace_schema_metadata(schema.metadata) for table in tables])
    if name != "parameters":
        return table
    stages: dict[str, set[str]] = {}
    keep = []
    columns = (table.column(column).to_pylist() for column in ("name", "stages"))
    for row, (parameter, stage) in enumerate(zip(*columns, strict=True)):
        if parameter not in stages:
            stages[parameter] = set()
            keep.append(row)
        stages[parameter].update(each for each in (stage or "").split(",") if each)
    table = table.take(pa.array(keep, pa.int64()))
    joined = [_joined_stages(each) for each in stages.values()]
    at = schema.get_field_index("stages")
    return table.set_column(at, schema.field(at), pa.array(joined, pa.string()))


def _joined_stages(stages: set[str]) -> str | None:
    """``0,2`` of several ranks' texts, which may have been joined before; ``0,2+`` where one of them ends with a plus."""
    numbers = sorted({each.rstrip("+") for each in stages}, key=lambda each: (len(each), each))
    mark = "+" if any(each.endswith("+") for each in stages) else ""
    return f"{','.join(numbers)}{mark}" if numbers else None


def _settled(manifest: Manifest, traces: Sequence[RankTrace]) -> Manifest:
    """The manifest after the ranks ended: their entries, and what only they knew."""
    manifest.ranks = entries_of(manifest, traces)
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


def take_config(manifest: Manifest, traces: Sequence[RankTrace]) -> None:
    """The config that the engine of the lowest rank published, where the manifest has none yet."""
    for trace in sorted(traces, key=lambda item: item.identity):
        config = (trace.config or {}).get("config")
        if manifest.effective_config is None and isinstance(config, dict):
            manifest.effective_config = config
            engine = (trace.config or {}).get("engine")
            manifest.engine = engine if isinstance(engine, str) else None
            manifest.engines = trace.engines


def _last_realtime(traces: Sequence[RankTrace]) -> int | None:
    times = [value for trace in traces for value in trace.tables["clocks"].column("realtime_ns").to_pylist()]
    return max(times, default=None)


def unseen_rows(groups: pa.Table) -> list[dict[str, Any]]:
    """The rows of ``groups`` that the self-check found something in."""
    rows: list[dict[str, Any]] = groups.filter(pc.greater(groups["unseen"], 0)).to_pylist()
    return rows


def _group_rows(run: Path, traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    tables = [trace.tables["groups"] for trace in traces]
    file = run / "groups.parquet"
    if file.exists():
        tables.append(read_parquet(file, "groups"))
    rows: list[dict[str, Any]] = []
    for table in tables:
        rows += unseen_rows(table)
    return rows


@contextlib.contextmanager
def _locked(run: Path) -> Iterator[bool]:
    """Only one process at a time. The lock is the kernel's, on the directory, so it goes with the process that holds it.

    Gives whether there is a lock: not every file system has them.
    """
    try:
        descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TraceError(f"{run} cannot be read: {error.strerror}") from None
    try:
        yield _lock(run, descriptor)
    finally:
        os.close(descriptor)


def _lock(run: Path, descriptor: int) -> bool:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TraceError(
                    f"{run} is being finalised by another process for more than {_LOCK_SECONDS} s; try again later"
                ) from None
            time.sleep(0.05)
        except OSError:
            return False
