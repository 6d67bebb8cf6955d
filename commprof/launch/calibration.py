"""Runs a calibration. This process is one of the ranks of a launcher, or starts the ranks itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from commprof.calibration.calibration_plan import Plan
from commprof.calibration.file import check_target
from commprof.calibration.rank import FORCE, carry_out, member_of
from commprof.errors import UsageError
from commprof.launch import environment
from commprof.launch.ranks import Rank, RankGroup
from commprof.recorder.process.placement import place

_LEAST_RANKS = 2


def calibrate(plan: Plan, ranks: int | None, out: Path, force: bool, say: Callable[[str], None]) -> int:
    """Run the calibration ``plan``, write the results to ``out``, and return the exit code of the command.

    Args:
        plan: The measurements to take.
        ranks: The number of ranks to start on this host. None means one per GPU, or 2 without GPUs. The number must be
            None if a launcher has started this process as a rank.
        out: The calibration file to write.
        force: Whether an existing file may be replaced.
        say: The function that is called with each line of text for the user.

    Raises:
        UsageError: ``out`` cannot be written, or there are fewer than two ranks.
        LaunchError: a rank could not be started.
    """
    check_target(out, force)
    if plan.backend == "nccl" and plan.device == "cpu":
        raise UsageError("--backend nccl needs --device cuda: NCCL does not send CPU tensors")
    here = place(os.environ)
    if here is not None:
        if ranks is not None:
            raise UsageError(
                f"--nproc {ranks} was given, but this process is rank {here.rank} of {here.world_size} already "
                f"({here.launcher}). Leave --nproc out, or unset the variables of this launcher"
            )
        _check_count(here.world_size)
        return carry_out(plan, out, force, member_of(os.environ, here.rank, here.world_size))
    count = _default_count(plan) if ranks is None else ranks
    _check_count(count)
    group = RankGroup(_planned(plan, out, force, count, os.environ), say)
    group.start()
    return group.wait().exit_code


def is_first(environ: Mapping[str, str]) -> bool:
    """Return whether this process is the one that prints the messages of the calibration."""
    here = place(environ)
    return here is None or here.rank == 0


def _check_count(count: int) -> None:
    if count < _LEAST_RANKS:
        raise UsageError(f"{count} rank cannot send to another; 2 or more were expected (--nproc 2)")


def _default_count(plan: Plan) -> int:
    if plan.device == "cpu" or plan.backend == "gloo":
        return environment.DEFAULT_RANKS
    return max(_LEAST_RANKS, environment.default_ranks(os.environ))


def _planned(plan: Plan, out: Path, force: bool, count: int, environ: Mapping[str, str]) -> list[Rank]:
    arguments = [plan.to_json(), str(out), *([FORCE] if force else [])]
    command_line = [*environment.python_command(), "-m", "commprof.calibration", *arguments]
    port, defaults = environment.free_port(), environment.thread_defaults(environ, count)
    return [
        Rank(rank, command_line, environment.rank_environment(environ, rank, count, port, defaults))
        for rank in range(count)
    ]
