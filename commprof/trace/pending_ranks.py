"""Determines which ranks of a run directory are finalized, and reads the others."""

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
    """Return whether ``run`` contains files of an ongoing recording: it still records, or was never finalized.

    Raises:
        OSError: The directory cannot be read.
    """
    return bool(rank_files(run) or reading_files(run) or sample_files(run))


def load_manifest(run: Path) -> Manifest:
    """Return the manifest of ``run``, with an entry for each Parquet file of a rank.

    If ``run.json`` is missing, the manifest is built from the files of the ranks.
    """
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
    """Return the manifest entry of a rank from the metadata of its Parquet file."""
    try:
        entry: dict[str, Any] = json.loads(read_metadata(file)[ENTRY_KEY])
    except (KeyError, ValueError, RecursionError):
        raise TraceError(f"{file} was not written by commprof: it does not say which rank it is") from None
    problem = wrong_entry(entry)
    if problem is not None:
        raise TraceError(f"{file} is damaged: {problem}")
    return entry


def require_tables(run: Path, manifest: Manifest, *names: str) -> None:
    """Raise an error if ``run`` lacks a table among ``names`` that its manifest lists.

    Raises:
        TraceError: The file of such a table is missing.
    """
    for name in names:
        if name in (manifest.tables or ()) and not (run / f"{name}.parquet").exists():
            raise TraceError(
                f"{name}.parquet of {run} is missing; it was written when the run was finalized or aligned; copy "
                "the run "
                "again with all its files"
            )


def list_tables(path: Path, names: Collection[str]) -> None:
    """Add the tables among ``names`` that have a file to the list in ``run.json``.

    The list makes it possible to detect a file that gets lost later.

    Raises:
        TraceError: The directory cannot be written to.
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
    """Return the files of records that ``manifest`` names but ``run`` lacks, and a sentence for each file."""
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
    """Return the decoded traces of the ranks that are not in Parquet yet, and a sentence for each unreadable rank."""
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
    """Return ``traces`` such that the evaluations and checkpoints of any rank apply to all ranks of the attempt."""
    return [_with_others(run, trace, traces) for trace in traces]


def _with_others(run: Path, trace: RankTrace, traces: Sequence[RankTrace]) -> RankTrace:
    """Return ``trace``, decoded again if another rank evaluated or saved after further steps.

    The time that one rank spends on an evaluation or checkpoint is outside of the steps of all ranks.
    """
    elsewhere: dict[int, str] = {}
    for other in traces:
        if other.identity.attempt == trace.identity.attempt:
            elsewhere = other.outside | elsewhere
    if elsewhere.keys() <= trace.outside.keys():
        return trace
    return read_rank(run / trace.identity.stem, elsewhere)


def finalised_stems(run: Path) -> set[str]:
    """Return the stems of rank files whose rows are in every table."""
    if not rank_files(run):
        return set()
    stems = {file.stem for file in (run / COLLECTIVES_DIRECTORY).glob("rank-*.parquet")}
    for name in SIDE_TABLES if stems else ():
        stems &= stems_in(run, name)
    return {stem for stem in stems if entry_of(collectives_file(run, stem)).get("file") == stem}


def collectives_file(run: Path, stem: str) -> Path:
    """Return the path of the Parquet file with the collectives of the rank file ``stem``."""
    return run / COLLECTIVES_DIRECTORY / f"{stem}.parquet"


def stems_in(run: Path, name: str) -> set[str]:
    """Return the stems of the rank files whose rows are already in table ``name``."""
    file = run / f"{name}.parquet"
    try:
        return set(json.loads(read_metadata(file).get(STEMS_KEY, b"[]")))
    except (ValueError, TypeError):
        raise TraceError(f"{file} is damaged: the list of the ranks that it holds cannot be read") from None


def entries_of(manifest: Manifest, traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Return one entry per rank file. An entry of ``traces`` replaces the older entry in the manifest."""
    entries = {(e["rank"], e["attempt"], e["pid"], e.get("part", 1)): e for e in manifest.ranks}
    entries.update({(*trace.identity,): trace.entry for trace in traces})
    return [entries[key] for key in sorted(entries)]


def launcher_works(manifest: Manifest) -> bool:
    """Return whether the launcher of the run is still running. False if this process is the launcher."""
    launcher = manifest.launcher
    return (
        manifest.state == RUNNING
        and launcher is not None
        and launcher.get("pid") != os.getpid()
        and bool(is_alive(launcher))
    )


def still_working(run: Path, manifest: Manifest, traces: Sequence[RankTrace]) -> bool:
    """Return whether the launcher or a rank of the run is still running, so that its files must not be changed."""
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
    """Concatenate the tables of the ranks.

    All ranks publish the same rows of ``parameters``, so only the first row of each parameter name is kept. The stages
    of a pipeline publish different parameters. If several stages have a parameter, its row lists all these stages.
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
    """Join the stages of several ranks, for example to ``0,2``, or to ``0,2+`` if an input ends with a plus."""
    numbers = sorted({each.rstrip("+") for each in stages}, key=lambda each: (len(each), each))
    mark = "+" if any(each.endswith("+") for each in stages) else ""
    return f"{','.join(numbers)}{mark}" if numbers else None


def take_config(manifest: Manifest, traces: Sequence[RankTrace]) -> None:
    """Copy the config that the engine of the lowest rank published into ``manifest``, unless it has one."""
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
    """Return the rows of ``groups`` for which the self-check found unseen collectives."""
    rows: list[dict[str, Any]] = groups.filter(pc.greater(groups["unseen"], 0)).to_pylist()
    return rows


@contextlib.contextmanager
def locked(run: Path, kind: int) -> Iterator[bool]:
    """Lock ``run`` exclusively (``fcntl.LOCK_EX``) or shared with other readers (``LOCK_SH``).

    While the lock is held, no other process replaces files. The kernel holds the lock on the directory, and releases
    it when the process exits.

    Yields:
        Whether the run is locked. False if the file system does not support locks.

    Raises:
        TraceError: The directory cannot be read, or another process keeps the lock for two minutes.
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
                    f"another process has been finalizing {run} for more than {_LOCK_SECONDS} s; try again later"
                ) from None
            time.sleep(0.05)
        except OSError:
            return False
