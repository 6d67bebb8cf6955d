"""Runs and records one job from start to end: directory, manifest, ranks, counters, finalization, last line.

Each stage of the job is a function. Only this module uses all other modules of the package.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.deepspeed_provider import Engine
from commprof.errors import CommprofError, LaunchError, UsageError
from commprof.launch import environment, injection, last_line
from commprof.launch.logs import job_log, nccl_log
from commprof.launch.observers import observed
from commprof.launch.ranks import Outcome, Rank, RankGroup
from commprof.launch.sweeps.config_file import ConfigFile, find_config
from commprof.launch.user_program import Kind, Program
from commprof.recorder.process.recorder_options import DEFAULTS, Options
from commprof.trace import directory, manifest
from commprof.trace.config_copy import CONFIG_NAME
from commprof.trace.process import start_ticks

OUTPUT_NAME: Final = "output.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The program to run, and how to run and record it.

    Only a sweep sets ``derived``, ``sweep`` and ``keep_output``.

    Attributes:
        program: The program of the user.
        ranks: The number of ranks to start. None means the default number, or that a command starts its own ranks.
        out: The run directory, or None for a new directory below ``traces``.
        force: Whether an existing run in ``out`` may be replaced.
        derived: The config of this run, which replaces the config in the arguments of the script.
        sweep: The name of the sweep, the point and the number of the repetition.
        keep_output: Whether to write the output of the program into the run.
        nccl_log: Whether to request a log from NCCL.
        wire: Whether to read the interface counters at each step.
        recording: How the ranks are recorded.
        engine: The package that ``import deepspeed`` imports in the ranks. None leaves the import unchanged.
    """

    program: Program
    ranks: int | None = None
    out: Path | None = None
    force: bool = False
    derived: ConfigFile | None = None
    sweep: Mapping[str, Any] | None = None
    keep_output: bool = False
    nccl_log: nccl_log.Mode = nccl_log.Mode.AUTO
    wire: bool = False
    recording: Options = DEFAULTS
    engine: Engine | None = None


class Finished(NamedTuple):
    """The result of a job that has ended."""

    run: Path
    exit_code: int
    first_failed_rank: int | None = None
    asked_to_stop: bool = False


def run_job(job: Job, say: Callable[[str], None]) -> Finished:
    """Run ``job`` and record it.

    Args:
        job: The job to run.
        say: The function that is called with each line of text for the user.

    Raises:
        UsageError: ``job.out`` is not empty, or the options contradict the environment.
        LaunchError: a process could not be started.
        TraceError: the run directory cannot be created.
    """
    check_ranks(job.program, job.ranks)
    ranks = _rank_count(job)
    run = job.out or directory.claim_run_directory(job.program.stem, datetime.now())
    log = job_log.ask(job.nccl_log, run)
    create(job, run, ranks=ranks, launcher=_this_process(), log=log, say=say)
    planned = _plan_ranks(job, run, ranks, log, say)
    injection.announce(os.environ, run, say)
    job_log.begin(log, run, say)
    return _run_ranks(job, run, planned, log, say)


def create(
    job: Job,
    run: Path,
    *,
    ranks: int | None,
    launcher: Mapping[str, int],
    log: nccl_log.Request,
    say: Callable[[str], None],
) -> None:
    """Create the directory ``run`` with its manifest and a copy of the program's config file.

    Args:
        job: The job to record.
        run: The run directory.
        ranks: The number of ranks, or None if it is not known yet.
        launcher: The ``pid`` and ``start_ticks`` of the process that the job depends on.
        log: The variables for the log of NCCL.
        say: The function that is called with each line of text for the user.

    Raises:
        UsageError: the directory is not empty, and ``job.force`` is not set or cannot replace it.
        TraceError: the directory cannot be created.
    """
    config_file = job.derived or find_config(job.program)
    # Read the config before an earlier run is removed, because the config may be a file in the earlier run.
    config_text = _config_text(job, config_file)
    manifest.create_run(run, _first_manifest(job, config_file, ranks, launcher, log), force=job.force)
    _keep_config(run, config_text)
    if config_file is not None and config_file.problem is not None:
        say(
            f"warning: {config_file.problem}. commprof only reads this file; {job.program.target} decides what to do with it"
        )


def check_ranks(program: Program, ranks: int | None) -> None:
    """Raise UsageError if a number of ranks is given for a command that starts its own ranks."""
    if ranks is not None and program.kind is Kind.COMMAND:
        raise UsageError(
            f"--nproc cannot be used with '-- {program.target}', which starts its own ranks; "
            "give the number of ranks to that command"
        )


def _first_manifest(
    job: Job,
    config_file: ConfigFile | None,
    ranks: int | None,
    launcher: Mapping[str, int],
    log: nccl_log.Request,
) -> manifest.Manifest:
    program = job.program
    of_process = manifest.describe_process({**os.environ, **log.set})
    return manifest.Manifest(
        **{**of_process, "command": program.command_line(["python"])},
        script=program.script,
        started_realtime_ns=time.time_ns(),
        nproc=ranks,
        world_size=ranks,
        hosts=[socket.gethostname()],
        launcher={
            **launcher,
            "host": socket.gethostname(),
            "nccl_log": log.described(),
            "wire": job.wire,
            "engine": job.engine.value if job.engine is not None else None,
            "options": job.recording.changed(),
        },
        torch=_torch_version(),
        config=config_file.content if config_file else None,
        config_path=str(config_file.path) if config_file else None,
        config_argument=config_file.argument if config_file else None,
        sweep=dict(job.sweep) if job.sweep is not None else None,
    )


def _this_process() -> dict[str, int]:
    return {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()) or 0}


def _rank_count(job: Job) -> int | None:
    if job.program.kind is Kind.COMMAND:
        return None
    return job.ranks or environment.default_ranks(os.environ)


def _torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _config_text(job: Job, config_file: ConfigFile | None) -> bytes | None:
    """Return the content of the copy of the config in the run, or None if there is no config."""
    if config_file is None or config_file.content is None:
        return None
    if job.derived is not None:
        return f"{json.dumps(config_file.content, indent=2)}\n".encode()
    try:
        return config_file.path.read_bytes()
    except OSError as error:
        raise LaunchError(f"the config {config_file.path} cannot be read: {error.strerror}") from error


def _keep_config(run: Path, text: bytes | None) -> None:
    if text is None:
        return
    try:
        (run / CONFIG_NAME).write_bytes(text)
    except OSError as error:
        raise LaunchError(f"{run / CONFIG_NAME} cannot be written: {error.strerror}") from error


def _plan_ranks(
    job: Job, run: Path, count: int | None, log: nccl_log.Request, say: Callable[[str], None]
) -> list[Rank]:
    watched = run / CONFIG_NAME if job.derived is not None else None
    inherited = {
        **injection.injected(
            os.environ, run, watched_file=watched, wire=job.wire, recording=job.recording, engine=job.engine
        ),
        **log.set,
    }
    command_line = job.program.command_line(environment.python_command())
    if count is None:
        say(f"recording {job.program.target} into {last_line.shown(run)}")
        return [Rank(0, command_line, inherited, reads_stdin=not job.keep_output)]
    defaults = environment.thread_defaults(os.environ, count)
    defaults_text = "".join(f", {name}={value} (was not set)" for name, value in defaults.items())
    say(f"recording {count} {'rank' if count == 1 else 'ranks'} into {last_line.shown(run)}{defaults_text}")
    port = environment.free_port()
    return [
        Rank(
            rank,
            command_line,
            environment.rank_environment(inherited, rank, count, port, defaults),
            reads_stdin=rank == 0 and not job.keep_output,
        )
        for rank in range(count)
    ]


def _run_ranks(
    job: Job, run: Path, ranks: list[Rank], log: nccl_log.Request, say: Callable[[str], None]
) -> Finished:
    # The user's launcher stops its ranks when it gets SIGTERM. A launcher that is killed cannot stop them.
    is_command = job.program.kind is Kind.COMMAND
    started_ns = time.time_ns()
    with _output(run, job) as output:
        planned = [rank._replace(output=output) for rank in ranks]
        group = RankGroup(
            planned, say, death_signal=signal.SIGTERM if is_command else signal.SIGKILL, is_command=is_command
        )
        try:
            group.start()
        except LaunchError:
            close_manifest(run, exit_code=LaunchError.exit_code, first_failed_rank=None)
            raise
        outcome = sample_and_wait(run, group, job.recording, say)
    if outcome.exit_code and not is_command:
        say(describe_failure(outcome))
    first_failed = None if is_command else outcome.first_failed_rank
    close_manifest(run, exit_code=outcome.exit_code, first_failed_rank=first_failed)
    job_log.collect(log, run, started_ns)
    job_log.end(log, run, say)
    say(last_line.last_line(run))
    last_line.keep_summaries(run)
    if job.derived is None:
        injection.forget_notes(run)
    return Finished(run, outcome.exit_code, first_failed, outcome.asked_to_stop is not None)


@contextlib.contextmanager
def _output(run: Path, job: Job) -> Iterator[int | None]:
    """Yield the descriptor that the program writes to, or None if the program uses the output of this process."""
    if not job.keep_output:
        yield None
        return
    try:
        file = (run / OUTPUT_NAME).open("ab")
    except OSError as error:
        raise LaunchError(f"{run / OUTPUT_NAME} cannot be written: {error.strerror}") from error
    with file:
        yield file.fileno()


def sample_and_wait(run: Path, group: RankGroup, recording: Options, say: Callable[[str], None]) -> Outcome:
    """Wait for ``group``. Meanwhile, write the interface counters and the requested samples into ``run``."""
    with observed(run, recording, say), last_line.prepared():
        return group.wait()


def describe_failure(outcome: Outcome) -> str:
    """Return one line about the rank that failed first and the ranks that were stopped."""
    how = f"was killed by {outcome.signal_name}" if outcome.signal_name else "failed"
    text = f"rank {outcome.first_failed_rank} {how} first; exit code {outcome.exit_code}"
    if outcome.stopped_ranks:
        listed = ", ".join(map(str, outcome.stopped_ranks))
        text += f". Still running {outcome.grace_seconds:g} s later, and stopped: {listed}"
    return text


def close_manifest(run: Path, *, exit_code: int, first_failed_rank: int | None) -> None:
    """Write into the manifest how the job ended.

    Never raises, because the records of the ranks are complete without this information.
    """
    try:
        ended = replace(
            manifest.read_manifest(run),
            ended_realtime_ns=time.time_ns(),
            state=manifest.FAILED if exit_code else manifest.COMPLETE,
            exit_code=exit_code,
            first_failed_rank=first_failed_rank,
        )
        manifest.write_manifest(run, ended)
    except (CommprofError, OSError):
        pass
