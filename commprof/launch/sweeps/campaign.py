"""Runs the points of a sweep, each with its derived config, and checks that each run used this config."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.deepspeed_provider import Engine
from commprof.errors import CommprofError, TraceError, UsageError
from commprof.launch import injection
from commprof.launch.job import OUTPUT_NAME, Finished, Job, check_ranks, run_job
from commprof.launch.logs.nccl_log import Mode
from commprof.launch.sweeps.config_file import ConfigFile, read_config
from commprof.launch.sweeps.points import Turn, derive, label, mismatches
from commprof.launch.user_program import CONFIG_ARGUMENTS, Program, find_argument, replace_argument
from commprof.recorder.process.placement import place
from commprof.recorder.process.recorder_options import DEFAULTS, Options
from commprof.trace import directory, manifest
from commprof.trace.config_copy import CONFIG_NAME
from commprof.trace.predictions_file import PREDICTIONS_NAME

_TAIL_LINES: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A sweep: the program, the varied settings, and the directory of the runs.

    ``argument`` is the position in ``program.arguments`` of the word that the path of the derived config replaces.
    """

    program: Program
    turns: Sequence[Turn]
    config: ConfigFile
    argument: int
    out: Path
    ranks: int | None = None
    show_output: bool = False
    nccl_log: Mode = Mode.AUTO
    wire: bool = False
    engine: Engine | None = None
    recording: Options = DEFAULTS


class TurnResult(NamedTuple):
    """The result of one run of a sweep. ``problem`` is None if the run can be compared."""

    turn: Turn
    run: Path
    problem: str | None
    asked_to_stop: bool = False


def find_config_argument(program: Program, name: str | None) -> tuple[int, ConfigFile]:
    """Return the argument of ``program`` that names its config, and that config.

    Args:
        program: The program of the sweep.
        name: The name of the argument (``--config-arg``). None means any of ``CONFIG_ARGUMENTS``.

    Raises:
        UsageError: there is no such argument, or the file that it names is not a JSON object.
    """
    names = CONFIG_ARGUMENTS if name is None else (name if name.startswith("-") else f"--{name}",)
    argument = find_argument(program.arguments, names)
    if argument is None:
        wanted = f"no argument {names[0]}" if name else "none of --config, --deepspeed_config and --ds_config"
        remedy = "" if name else "; if its argument has another name, add --config-arg NAME"
        raise UsageError(
            f"the arguments of {program.target} have {wanted}, so there is no config to vary. Name it after the script: "
            f"commprof sweep --set ... -- {program.target} --config ds.json{remedy}"
        )
    return argument.position, ConfigFile(argument.name, Path(argument.value), read_config(argument.value))


def default_directory(program: Program, now: datetime) -> Path:
    """Return a path ``traces/<script>-sweep-<time>`` that does not exist yet."""
    return directory.default_run_directory(f"{program.stem}-sweep", now)


def check_launch(program: Program, ranks: int | None) -> None:
    """Raise UsageError if this process cannot start ranks of ``program``."""
    check_ranks(program, ranks)
    here = place(os.environ)
    if here is not None:
        raise UsageError(
            f"this process is rank {here.rank} of {here.world_size} already ({here.launcher}), and a sweep starts ranks of "
            "its own. Unset the variables of this launcher, or start commprof run with the launcher"
        )


def check_room(out: Path, force: bool) -> list[Path]:
    """Return the earlier runs in ``out``, which :func:`make_room` removes. Changes no files.

    Raises:
        UsageError: ``out`` is not empty. With ``force``, ``out`` contains predictions or an entry that is not a run.
        TraceError: ``out`` cannot be read.
    """
    try:
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file; a sweep needs a directory. Choose another --out")
        if (out / PREDICTIONS_NAME).exists():
            raise UsageError(
                f"{out / PREDICTIONS_NAME} has the predictions of an earlier sweep, which are not replaced. Choose another "
                "--out"
            )
        children = sorted(out.iterdir()) if out.is_dir() else []
        others = [child for child in children if not directory.is_run(child)]
        if directory.is_run(out) or (others and children):
            raise UsageError(
                f"{out} is not empty and is not a sweep, so it is not changed. Choose another --out"
            )
        if children and not force:
            raise UsageError(
                f"{out} already has {len(children)} runs. Choose another --out, or give --force to replace them"
            )
        for child in children:
            manifest.check_replaceable(child)
    except OSError as error:
        raise TraceError(f"{out} cannot be used: {error.strerror}. Choose another --out") from error
    return children


def make_room(out: Path, force: bool) -> None:
    """Remove the earlier runs from ``out``, so that it contains only the runs of this sweep.

    Raises:
        UsageError, TraceError: as in :func:`check_room`, or an earlier run cannot be removed.
    """
    try:
        for child in check_room(out, force):
            shutil.rmtree(child)
    except OSError as error:
        raise TraceError(f"{out} cannot be used: {error.strerror}. Choose another --out") from error


def carry_out(campaign: Campaign, say: Callable[[str], None]) -> Iterator[TurnResult]:
    """Run each turn of ``campaign`` in order, and yield its result.

    Raises:
        UsageError, TraceError, LaunchError: as in :func:`commprof.launch.job.run_job`.
    """
    for turn in campaign.turns:
        run = campaign.out / directory_name(turn)
        content = derive(campaign.config.content or {}, turn.point)
        program = campaign.program._replace(
            arguments=replace_argument(campaign.program.arguments, campaign.argument, str(run / CONFIG_NAME))
        )
        job = Job(
            program=program,
            ranks=campaign.ranks,
            out=run,
            derived=campaign.config._replace(content=content),
            sweep={"name": campaign.out.name, "point": turn.point, "repeat": turn.repeat},
            keep_output=not campaign.show_output,
            nccl_log=campaign.nccl_log,
            wire=campaign.wire,
            engine=campaign.engine,
            recording=campaign.recording,
        )
        output_lines: list[str] = []
        finished = run_job(job, say if campaign.show_output else output_lines.append)
        problem = _problem(finished, turn, campaign)
        injection.forget_notes(run)
        yield TurnResult(turn, run, problem, finished.asked_to_stop)


def directory_name(turn: Turn) -> str:
    """Return the name of a run directory from its order and point, such as ``03-reduce_scatter_true-stage_2``.

    The name is for readability only. The manifest of the run is authoritative.
    """
    words = re.sub(r"[^A-Za-z0-9.]+", "_", label(turn.point).replace(" ", "-space-")).replace("_space_", "-")
    return f"{turn.number + 1:02d}-{words.strip('_')[:80]}"


def _problem(finished: Finished, turn: Turn, campaign: Campaign) -> str | None:
    if finished.exit_code:
        rank = (
            ""
            if finished.first_failed_rank is None
            else f"rank {finished.first_failed_rank} failed first, with "
        )
        return f"{rank}exit code {finished.exit_code}{_tail(finished.run)}"
    return unused(finished.run, turn.point, campaign.config.argument, engine_config(finished.run))


def unused(
    run: Path, point: Mapping[str, Any], argument: str, engine: Mapping[str, Any] | None
) -> str | None:
    """Return why ``run`` cannot have used its derived config, or None if the run can have used it.

    There are two sources: the config that the engine published, and the notes of processes that opened the file.

    Args:
        run: The run directory.
        point: The dotted keys that the sweep sets, with their values.
        argument: The name of the argument that names the config.
        engine: The config that the engine published, or None if no engine published a config.
    """
    if engine is not None:
        wrong = mismatches(point, engine)
        if wrong:
            listed = ", ".join(f"{m.key} is {json.dumps(m.used)}, not {json.dumps(m.asked)}" for m in wrong)
            return f"the engine did not use the derived config: {listed}. Does the script override the config of {argument}?"
    if any(note.get("state") == "config_opened" for note in injection.notes(run)):
        return None
    return (
        f"the script never opened {run / CONFIG_NAME}, the config derived for it: its settings come from elsewhere. "
        f"Let it read the file that {argument} names, or name the argument that it reads with --config-arg"
    )


def engine_config(run: Path) -> dict[str, Any] | None:
    """Return the config that an engine published in the run, or None if there is none or the run cannot be read."""
    try:
        from commprof.trace.reader import open_run

        return open_run(run).manifest.effective_config
    except (CommprofError, ImportError, OSError):
        return None


def _tail(run: Path) -> str:
    try:
        lines = (run / OUTPUT_NAME).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    if not lines:
        return ""
    return f". The end of {run / OUTPUT_NAME}:\n" + "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
