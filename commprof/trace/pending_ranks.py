"""Determines which ranks of a run directory are finalised and which are not. Writes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from commprof.errors import TraceError
from commprof.trace.directory import COLLECTIVES_DIRECTORY, MANIFEST_NAME, elsewhere
from commprof.trace.liveness import recently_touched
from commprof.trace.manifest import RUNNING, Manifest, read_manifest, write_manifest, wrong_entry
from commprof.trace.process import is_alive
from commprof.trace.rank_files.decoder import RankTrace, read_rank
from commprof.trace.rank_files.layout import rank_files
from commprof.trace.tables import arrow_schema, read_metadata
from commprof.trace.wire import reading_files, sample_files

_LOCK_SECONDS: Final = 120
NO_MANIFEST: Final = (
    f"{MANIFEST_NAME} was missing: the command, the config, the environment and the versions are not known"
)
ENTRY_KEY: Final = b"commprof.rank"
STEMS_KEY: Final = b"commprof.rank_files"
SIDE_TABLES: Final = (
    "groups",
    "steps",
    "outside_steps",
    "metrics",
    "parameters",
    "expert_layers",
    "expert_loads",
    "wrappers",
    "wrapper_passes",
    "buckets",
    "stalls",
    "flight",
    "clocks",
    "clock_offsets",
    "aggregates",
)


def is_unfinalised(run: Path) -> bool:
    """Whether ``run`` holds files that processes write to as they go: it still works, or was never finalised.

    Raises:
        OSError: the directory cannot be read.
    """
    return bool(rank_files(run) or reading_files(run) or sample_files(run))


def load_manifest(run: Path) -> Manifest:
    """The manifest of ``run``, or one that says what can be known without it."""
    if (run / MANIFEST_NAME).exists():
        manifest = read_manifest(run)
    else:
        files = [file for file in run.rglob("rank-*") if file.is_file()]
        manifest = Manifest(
            started_realtime_ns=min((file.stat().st_mtime_ns for file in files), default=0),
            notes=[NO_MANIFEST],
        )
    known = {entry.get("file") for entry in manifest.ranks}
    for file in sorted((run / COLLECTIVES_DIRECTORY).glob("rank-*.parquet")):
        if file.stem not in known:
            manifest.ranks.append(entry_of(file))
    return manifest


def entry_of(file: Path) -> dict[str, Any]:
    """The manifest's entry of a rank, from the metadata of its Parquet file."""
    try:
        entry: dict[str, Any] = json.loads(read_metadata(file)[ENTRY_KEY])
    except (KeyError, ValueError, RecursionError):
        raise TraceError(f"{file} was not written by commprof: it does not say which rank it is") from None
    problem = wrong_entry(entry)
    if problem is not None:
        raise TraceError(f"{file} is damaged: {problem}")
    return entry


def require_tables(run: Path, manifest: Manifest, *names: str) -> None:
    """See that those of the tables ``names`` are there that were written when ``run`` was finalised.

    Raises:
        TraceError: one is missing.
    """
    for name in names:
        if name in (manifest.tables or ()) and not (run / f"{name}.parquet").exists():
            raise TraceError(
                f"{name}.parquet of {run} is missing; it was written when the run was finalised or aligned; copy the run "
                "again with all its files"
            )


def list_tables(path: Path, names: Collection[str]) -> None:
    """Name in ``run.json`` those of the tables ``names`` that have a file, so that it is noticed where one gets lost.

    Raises:
        TraceError: the directory cannot be written to.
    """
    if not (path / MANIFEST_NAME).exists():
        return
    manifest = load_manifest(path)
    written = {name for name in names if (path / f"{name}.parquet").exists()}
    tables = sorted({*(manifest.tables or ()), *written})
    if tables != manifest.tables:
        manifest.tables = tables
        write_manifest(path, manifest)


def gone_records(run: Path, manifest: Manifest) -> dict[str, str]:
    """The files of records that ``manifest`` names and ``run`` lacks, with a sentence for each."""
    present = {file.stem for file in (run / COLLECTIVES_DIRECTORY).glob("rank-*.parquet")}
    present |= {stem.name for _, stem in rank_files(run)}
    there = elsewhere(run)
    present |= there.stems if there is not None else set()
    return {
        entry[
            "file"
        ]: f"rank {entry['rank']}: {COLLECTIVES_DIRECTORY}/{entry['file']}.parquet is missing, and "
        f"{entry.get('records') or 0:,} records with it: copy it again from where the run was recorded"
        for entry in manifest.ranks
        if entry.get("file") is not None and entry["file"] not in present
    }


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
    return beside_each_other(run, traces), damaged


def beside_each_other(run: Path, traces: Sequence[RankTrace]) -> list[RankTrace]:
    """``traces`` as they read together: see :func:`_with_others`."""
    return [_with_others(run, trace, traces) for trace in traces]


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
    for name in SIDE_TABLES if stems else ():
        stems &= stems_in(run, name)
    return {stem for stem in stems if entry_of(collectives_file(run, stem)).get("file") == stem}


def collectives_file(run: Path, stem: str) -> Path:
    """The Parquet file of the collectives of the rank file ``stem``."""
    return run / COLLECTIVES_DIRECTORY / f"{stem}.parquet"


def stems_in(run: Path, name: str) -> set[str]:
    """The rank files whose rows table ``name`` holds already."""
    file = run / f"{name}.parquet"
    try:
        return set(json.loads(read_metadata(file).get(STEMS_KEY, b"[]")))
    except (ValueError, TypeError):
        raise TraceError(f"{file} is damaged: the list of the ranks that it holds cannot be read") from None


def entries_of(manifest: Manifest, traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """One entry per rank file: those in the manifest and those of ``traces``, which are newer."""
    entries = {(e["rank"], e["attempt"], e["pid"], e.get("part", 1)): e for e in manifest.ranks}
    entries.update({(*trace.identity,): trace.entry for trace in traces})
    return [entries[key] for key in sorted(entries)]


def launcher_works(manifest: Manifest) -> bool:
    """Whether the ``commprof run`` that started the run still works; False where it is this process."""
    launcher = manifest.launcher
    return (
        manifest.state == RUNNING
        and launcher is not None
        and launcher.get("pid") != os.getpid()
        and bool(is_alive(launcher))
    )


def still_working(run: Path, manifest: Manifest, traces: Sequence[RankTrace]) -> bool:
    """Whether the launcher or a rank of the run still works, so that its files must be left alone."""
    if launcher_works(manifest):
        return True
    for trace in traces:
        if trace.entry["ended"]:
            continue
        alive = is_alive(trace.begin)
        if alive or (alive is None and recently_touched(run / trace.identity.stem)):
            return True
    return False


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


def take_config(manifest: Manifest, traces: Sequence[RankTrace]) -> None:
    """The config that the engine of the lowest rank published, where the manifest has none yet."""
    for trace in sorted(traces, key=lambda item: item.identity):
        config = (trace.config or {}).get("config")
        if manifest.effective_config is None and isinstance(config, dict):
            manifest.effective_config = config
            engine = (trace.config or {}).get("engine")
            manifest.engine = engine if isinstance(engine, str) else None
            manifest.engines = trace.engines
            construction = (trace.config or {}).get("construction")
            manifest.construction = construction if isinstance(construction, dict) else None


def unseen_rows(groups: pa.Table) -> list[dict[str, Any]]:
    """The rows of ``groups`` that the self-check found something in."""
    rows: list[dict[str, Any]] = groups.filter(pc.greater(groups["unseen"], 0)).to_pylist()
    return rows


@contextlib.contextmanager
def locked(run: Path, kind: int) -> Iterator[bool]:
    """Alone with ``run`` (``fcntl.LOCK_EX``), or beside others that read it (``LOCK_SH``): no file is replaced meanwhile.

    The lock is the kernel's, on the directory, so it goes with the process that holds it.

    Gives whether there is a lock: not every file system has them.

    Raises:
        TraceError: the directory cannot be read, or another process holds the lock for two minutes.
    """
    try:
        descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TraceError(f"{run} cannot be read: {error.strerror}") from None
    try:
        yield _lock(run, descriptor, kind)
    finally:
        os.close(descriptor)


def _lock(run: Path, descriptor: int, kind: int) -> bool:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TraceError(
                    f"{run} is being finalised by another process for more than {_LOCK_SECONDS} s; try again later"
                ) from None
            time.sleep(0.05)
        except OSError:
            return False
