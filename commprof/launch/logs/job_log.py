"""The NCCL log of a job: requested at the start of the job, collected and counted at its end, and reported."""

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
    """Return the variables that request a log from NCCL in the ranks of ``run``."""
    gpus = mode is nccl_log.Mode.AUTO and environment.visible_gpus(os.environ) > 0
    known = nccl_log.with_user_file(os.environ, nccl_log.user_file(os.environ))
    return nccl_log.request(known, run, mode, gpus=gpus)


def begin(log: nccl_log.Request, run: Path, say: Callable[[str], None]) -> None:
    """Report which variables were set for the log of NCCL, and create the directory of the log."""
    if nccl_log.FILE in log.set:
        nccl_files.make_directory(run)
    for sentence in log.sentences(last_line.shown(run)):
        say(sentence)


def collect(log: nccl_log.Request, run: Path, since_ns: int, pids: Collection[int] | None = None) -> None:
    """Copy the log that the user's own NCCL_DEBUG_FILE names into the run.

    Args:
        log: The variables of the job's log.
        run: The run directory.
        since_ns: The time in ns on the real-time clock at which the job started.
        pids: The processes whose files are copied. None means the recorded processes.
    """
    if log.own_file is not None:
        chosen = nccl_files.rank_processes(run) if pids is None else pids
        nccl_files.collect(log.own_file, run, since_ns, chosen)


def end(log: nccl_log.Request, run: Path, say: Callable[[str], None]) -> None:
    """Report how much NCCL has printed. If a log was requested and is empty, report this and the possible reasons."""
    cost = nccl_files.measure(run)
    if cost is not None:
        _note(run, log, cost)
        say(cost.sentence(last_line.shown(run)))
    elif log.set:
        say(
            "NCCL log: nothing was written: no process initialised NCCL, or what is set differently keeps it from printing"
        )


def _note(run: Path, log: nccl_log.Request, cost: nccl_files.Cost) -> None:
    """Write the size of the log into the manifest."""
    try:
        described = manifest.read_manifest(run)
        written = {"nccl_log": {**log.described(), "written": cost._asdict()}}
        manifest.write_manifest(run, replace(described, launcher={**(described.launcher or {}), **written}))
    except (CommprofError, OSError):
        pass
