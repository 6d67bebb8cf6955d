"""Opens a rank's files: chooses the run directory and file names, and writes the first line about the process."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from commprof.recorder.process.placement import agent_of, job_id, place, starter
from commprof.schema import SCHEMA_VERSION
from commprof.trace.directory import COLLECTIVES_DIRECTORY, MANIFEST_NAME, TRACES, run_name, script_stem
from commprof.trace.manifest import Manifest, describe_process, write_manifest_if_absent
from commprof.trace.process import process_start_ns, start_ticks
from commprof.trace.rank_files.layout import RankFile, parse_stem
from commprof.trace.rank_files.writer import EventFile, RecordFile, Spill
from commprof.version import __version__

RUN_VARIABLE: Final = "COMMPROF_RUN"
_AGENT: Final = "agent"  # the key in the manifest for the torchrun process that started the job


class Rank(NamedTuple):
    """The rank of this process."""

    rank: int
    world_size: int
    attempt: int  # the number of earlier restarts of an elastic job


class Opened(NamedTuple):
    """The open files of a rank."""

    directory: Path
    identity: RankFile
    records: RecordFile
    events: EventFile


def this_rank() -> Rank:
    """Return this process's rank, from torch.distributed if it is initialized, or else from the launcher."""
    attempt = _number(os.environ.get("TORCHELASTIC_RESTART_COUNT"), 0)
    if dist.is_initialized():
        return Rank(dist.get_rank(), dist.get_world_size(), attempt)
    here = place(os.environ)
    return Rank(0, 1, attempt) if here is None else Rank(here.rank, here.world_size, attempt)


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdigit() else default


def find_directory(out: str | os.PathLike[str] | None, rank: Rank, folder: Path) -> Path:
    """Return the run directory.

    This is ``out``, or else COMMPROF_RUN, or else a directory below ``traces/`` that all ranks of a launcher share. If
    the launcher gave the job a name, all ranks on all hosts can read this name from their environment. Otherwise the
    ranks of one launcher have the same parent process, and the start time of the parent names the run.

    A shell may be the parent of several jobs in succession, and a name may be used again. A directory belongs to a
    different job if it already contains files of this rank and attempt from a different process. In this case every
    rank uses the next number as a suffix.

    Args:
        out: The requested directory; None if none was requested.
        rank: The rank of this process.
        folder: The working directory at the time when recording was requested. Relative paths are resolved against it,
            because each rank of the program may have changed its working directory since.
    """
    chosen = out or os.environ.get(RUN_VARIABLE)
    if chosen:
        return (folder / chosen).absolute()
    first = (folder / TRACES / _shared_name(rank)).absolute()
    number, candidate = 1, first
    while _belongs_to_another_job(candidate, rank) or not _is_claimed(candidate, rank):
        number += 1
        candidate = first.with_name(f"{first.name}-{number}")
    return candidate


def _is_claimed(directory: Path, rank: Rank) -> bool:
    """Return whether ``directory`` belongs to this job, among jobs that were started in the same second.

    The directory belongs to the job that writes its manifest first.

    Raises:
        OSError: The directory cannot be created or written to.
    """
    agent = agent_of(os.environ)
    if agent is None:
        return True
    directory.mkdir(parents=True, exist_ok=True)
    _write_manifest(directory, rank)
    try:
        return json.loads((directory / MANIFEST_NAME).read_bytes()).get(_AGENT) == agent
    except (ValueError, AttributeError):
        return False


def _shared_name(rank: Rank) -> str:
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None) or (sys.argv[0] if sys.argv else "") or "run"
    job = job_id(os.environ) if rank.world_size > 1 else None
    if job is not None:
        return f"{script_stem(script)}-{job}"
    parent = starter(os.environ) if rank.world_size > 1 else os.getpid()
    started = process_start_ns(parent) or process_start_ns(os.getpid()) or time.time_ns()
    return run_name(script, datetime.fromtimestamp(started / 1e9))


def _belongs_to_another_job(directory: Path, rank: Rank) -> bool:
    files = [*directory.glob("rank-*"), *(directory / COLLECTIVES_DIRECTORY).glob("rank-*")]
    identities = [identity for file in files if (identity := parse_stem(file.stem)) is not None]
    return any(i.rank == rank.rank and i.attempt == rank.attempt and i.pid != os.getpid() for i in identities)


def open_files(directory: Path, rank: Rank, first_seq: int, spill: Spill | None = None) -> Opened:
    """Create the run directory, its manifest if it does not exist, and both files of this process.

    Args:
        directory: The run directory.
        rank: The rank of this process.
        first_seq: The number of the first record.
        spill: The object that receives the records that the file may not contain.

    Raises:
        OSError: The directory cannot be created or written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_manifest(directory, rank)
    part = 1
    while True:
        identity = RankFile(rank.rank, rank.attempt, os.getpid(), part)
        stem = directory / identity.stem
        if not (directory / COLLECTIVES_DIRECTORY / f"{identity.stem}.parquet").exists():
            try:
                events = EventFile(stem)
            except FileExistsError:
                pass  # the file belongs to an earlier recording of this process
            else:
                return Opened(directory, identity, RecordFile(stem, identity, first_seq, spill), events)
        part += 1


def _write_manifest(directory: Path, rank: Rank) -> None:
    fields = describe_process()
    manifest = Manifest(
        script=sys.argv[0] if sys.argv else None,
        started_realtime_ns=time.time_ns(),
        world_size=rank.world_size,
        hosts=[socket.gethostname()],
        torch=torch.__version__,
        **fields,
    )
    agent = agent_of(os.environ)
    if agent is not None:
        manifest.extra[_AGENT] = agent
    write_manifest_if_absent(directory, manifest)


def begin_row(identity: RankFile, world_size: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first line of the events file, which describes the process and the options of the recording."""
    return {
        "schema_version": SCHEMA_VERSION,
        "commprof_version": __version__,
        "rank": identity.rank,
        "attempt": identity.attempt,
        "pid": identity.pid,
        "part": identity.part,
        "world_size": world_size,
        "host": socket.gethostname(),
        "start_ticks": start_ticks(identity.pid),
        "time_ns": time.perf_counter_ns(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "options": dict(options),
    }
