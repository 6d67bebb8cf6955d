"""The NCCL log of a job: requested at its start, collected and counted at its end; one line reports each of these."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from commprof.errors import CommprofError
from commprof.launch import environment, last_line
from commprof.launch.logs import nccl_files, nccl_log
from commprof.trace import manifest


def ask(mode: nccl_log.Mode, run: Path) -> nccl_log.Request:
    """What NCCL is asked to print in the ranks of ``run``."""
    gpus = mode is nccl_log.Mode.AUTO and environment.visible_gpus(os.environ) > 0
    known = nccl_log.with_user_file(os.environ, nccl_log.user_file(os.environ))
    return nccl_log.request(known, run, mode, gpus=gpus)


def begin(log: nccl_log.Request, run: Path, say: Callable[[str], None]) -> None:
    """Say what was set for the log of NCCL, and make the directory that it goes to."""
    if nccl_log.FILE in log.set:
        nccl_files.make_directory(run)
    for sentence in log.sentences(last_line.shown(run)):
        say(sentence)


def collect(log: nccl_log.Request, run: Path, since_ns: int, pids: Collection[int] | None = None) -> None:
    """Copy the log that the user's own NCCL_DEBUG_FILE names into the run.

    Args:
        since_ns: when the job started, on the real-time clock.
        pids: the processes whose files are meant; None for those that were recorded.
    """
    if log.own_file is not None:
        chosen = nccl_files.rank_processes(run) if pids is None else pids
        nccl_files.collect(log.own_file, run, since_ns, chosen)


def end(log: nccl_log.Request, run: Path, say: Callable[[str], None]) -> None:
    """Say how much NCCL has printed. Where it was asked and has printed nothing, say that, and what that may mean."""
    cost = nccl_files.measure(run)
    if cost is not None:
        _note(run, log, cost)
        say(cost.sentence(last_line.shown(run)))
    elif log.set:
        say(
            "NCCL log: nothing was written: no process initialised NCCL, or what is set differently keeps it from printing"
        )


def _note(run: Path, log: nccl_log.Request, cost: nccl_files.Cost) -> None:
    """Write into the manifest how much NCCL has printed."""
    try:
        described = manifest.read_manifest(run)
        written = {"nccl_log": {**log.described(), "written": cost._asdict()}}
        manifest.write_manifest(run, replace(described, launcher={**(described.launcher or {}), **written}))
    except (CommprofError, OSError):
        pass
