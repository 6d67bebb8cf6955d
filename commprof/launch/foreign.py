"""Runs and records one process of a job that another launcher started.

Examples are ``torchrun ... -m commprof run train.py`` and ``mpirun -n 4 commprof run train.py``. Another example is
``srun commprof run -- torchrun ... train.py`` on each host of a Slurm job.

Each process runs its own commprof, which has one child process. All processes share a run directory. They derive its
name from values that are equal in all processes. Rank 0 creates the directory and prints the messages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final

from commprof.errors import CommprofError, UsageError
from commprof.launch import environment, injection, last_line
from commprof.launch.job import Finished, Job, close_manifest, create, describe_failure, sample_and_wait
from commprof.launch.logs import job_log, nccl_log
from commprof.launch.observers import sampled
from commprof.launch.ranks import Outcome, Rank, RankGroup
from commprof.launch.user_program import Kind, Program
from commprof.recorder.process.counters import is_first_of_host
from commprof.recorder.process.placement import Place, is_unique, job_id, place
from commprof.sampling.processes import local_ranks
from commprof.trace import directory, manifest
from commprof.trace.process import process_start_ns, start_ticks

WAIT_SECONDS: Final = 10.0


def belongs_to_a_job(job: Job, environ: Mapping[str, str]) -> Place | None:
    """Return the rank of this process in the launcher's job, or None if ``job`` does not belong to another job.

    A command after ``--`` starts its own ranks. Several such commands are one job only if they share a directory. This
    requires that the directory is given, or that the launcher gives the job an id.
    """
    here = place(environ)
    if here is None or job.program.kind is not Kind.COMMAND:
        return here
    return here if here.world_size > 1 and (job.out is not None or job_id(environ)) else None


def shared_directory(program: Program, environ: Mapping[str, str], parent_start_ns: int) -> Path:
    """Return the run directory below ``traces`` that all ranks of one job derive from the job's id or start time.

    Args:
        program: The program of the job.
        environ: The environment of this process.
        parent_start_ns: The time in ns on the real-time clock at which the launcher started.
    """
    name = job_id(environ)
    if name is None:
        started = directory.run_name(program.stem, datetime.fromtimestamp(parent_start_ns // 10**9))
        # An id that torchrun generated distinguishes jobs that start in the same second.
        made_up = environ.get("TORCHELASTIC_RUN_ID", "").partition("-")[0]
        return directory.TRACES / (f"{started}-{made_up}" if len(made_up) == 8 else started)
    return directory.TRACES / f"{program.stem}-{name}"


def not_before(run: Path, since_ns: int) -> Path:
    """Return the first path of ``run``, ``run-2``, ``run-3``, ... that no job before ``since_ns`` has created.

    Several directories may be necessary because a job's id may be reused. Every rank gets the same answer, before and
    after rank 0 has created the directory.
    """
    candidate, number = run, 1
    while _is_older(candidate, since_ns):
        number += 1
        candidate = run.with_name(f"{run.name}-{number}")
    return candidate


def _is_older(run: Path, since_ns: int) -> bool:
    try:
        return manifest.read_manifest(run).started_realtime_ns < since_ns
    except (CommprofError, OSError):
        return False


def run_foreign_rank(job: Job, place: Place, say: Callable[[str], None]) -> Finished:
    """Run and record this process of a job that another launcher started.

    Raises:
        UsageError: ``--nproc`` was given, or the directory contains another run.
    """
    if job.ranks is not None:
        raise UsageError(
            f"--nproc {job.ranks} was given, but this process is rank {place.rank} of {place.world_size} already "
            f"({place.launcher}). Leave --nproc out, or unset the variables of this launcher"
        )
    parent = os.getppid()
    since_ns = 0 if job.out is None and is_unique(os.environ) else process_start_ns(parent) or 0
    run = job.out or not_before(shared_directory(job.program, os.environ, since_ns), since_ns)
    job = replace(job, out=run)
    log = job_log.ask(job.nccl_log, run)
    if place.rank == 0:
        _make_directory(job, run, parent, place, log)
        which = "what it starts" if job.program.kind is Kind.COMMAND else "this rank"
        say(
            f"process 0 of {place.world_size} ({place.launcher}): recording {which} and those of the other hosts into "
            f"{last_line.shown(run)}"
        )
        injection.announce(os.environ, run, say)
    else:
        _await_directory(run, since_ns)
    # On a host that does not share the run directory, NCCL also needs a directory for its log.
    job_log.begin(log, run, say if place.rank == 0 else _say_nothing)
    outcome = _run_child(job, run, place, log, say)
    is_command = job.program.kind is Kind.COMMAND
    if outcome.exit_code and not is_command:
        say(describe_failure(outcome))
    if place.rank != 0 and is_first_of_host(os.environ):
        _keep_host(run)
    if place.rank == 0:
        _await_siblings(parent)
        if last_line.has_several_hosts(run):  # every host then writes its own file
            last_line.keep_host(run)
        failed = None if is_command else outcome.first_failed_rank
        close_manifest(run, exit_code=outcome.exit_code, first_failed_rank=failed)
        job_log.end(log, run, say)
        say(last_line.last_line(run))
        last_line.keep_summaries(run)
        injection.forget_notes(run)
    return Finished(run, outcome.exit_code, outcome.first_failed_rank)


def _run_child(
    job: Job, run: Path, place: Place, log: nccl_log.Request, say: Callable[[str], None]
) -> Outcome:
    variables = {
        **injection.injected(os.environ, run, wire=job.wire, recording=job.recording, engine=job.engine),
        **log.set,
    }
    command_line = job.program.command_line(environment.python_command())
    is_command = job.program.kind is Kind.COMMAND
    death_signal = signal.SIGTERM if is_command else signal.SIGKILL
    ranks = [Rank(place.rank, command_line, variables, reads_stdin=True)]
    group = RankGroup(ranks, say, death_signal=death_signal, is_command=is_command)
    started_ns = time.time_ns()
    group.start()
    pids = group.pids
    if place.rank == 0:
        outcome = sample_and_wait(run, group, job.recording, say)
    elif is_first_of_host(os.environ):
        with sampled(run, job.recording, say), last_line.prepared():
            outcome = group.wait()
    else:
        outcome = group.wait()
    # One process copies a file that all processes wrote.
    if log.own_file is not None and ("%p" in log.own_file or os.environ.get("LOCAL_RANK", "0") == "0"):
        job_log.collect(log, run, started_ns, pids)
    return outcome


def _say_nothing(text: str) -> None:
    pass


def _make_directory(job: Job, run: Path, parent: int, place: Place, log: nccl_log.Request) -> None:
    launcher = {"pid": parent, "start_ticks": start_ticks(parent) or 0}
    if _is_restart(run, launcher):
        return
    ranks = None if job.program.kind is Kind.COMMAND else place.world_size
    create(job, run, ranks=ranks, launcher=launcher, log=log, say=_say_nothing)


def _is_restart(run: Path, launcher: Mapping[str, int]) -> bool:
    """Return whether this launcher has created ``run`` before.

    After an elastic restart, commprof continues to record into the same directory.
    """
    try:
        known = manifest.read_manifest(run).launcher or {}
    except (CommprofError, OSError):
        return False
    return bool(launcher["start_ticks"]) and all(known.get(name) == value for name, value in launcher.items())


def _await_directory(run: Path, since_ns: int) -> None:
    """Wait until rank 0 has created ``run``, and create ``run`` after :data:`WAIT_SECONDS`.

    The other ranks wait because the directory must be empty when rank 0 creates the run. On a host that does not share
    the file system, the directory of rank 0 never appears.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            if manifest.read_manifest(run).started_realtime_ns >= since_ns:
                return
        except (CommprofError, OSError):
            pass
        time.sleep(0.02)
    run.mkdir(parents=True, exist_ok=True)


def _keep_host(run: Path, seconds: float = 5.0) -> None:
    """Write the file of this host when the other ranks of this host have ended, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(CommprofError, OSError):
        while local_ranks(run) and time.monotonic() < deadline:
            time.sleep(0.05)
    last_line.keep_host(run)


def _await_siblings(parent: int, seconds: float = 5.0) -> None:
    """Wait until the other ranks of this host have ended, but at most ``seconds``.

    So the last line covers all ranks of this host.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and _children(parent) - {os.getpid()}:
        time.sleep(0.05)


def _children(pid: int) -> set[int]:
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:
        return set()
