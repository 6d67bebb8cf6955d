"""One rank of a calibration: measures with the other ranks; the first rank writes the file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from commprof.calibration.calibration_plan import Plan
from commprof.calibration.calibration_sweep import Member, measure
from commprof.calibration.file import write_calibration
from commprof.errors import CommprofError

FORCE: Final = "force"  # the argument that allows an earlier file to be replaced


def member_of(environment: Mapping[str, str], rank: int, world_size: int) -> Member:
    """The place of this process, from the variables of launchers."""

    def number(*names: str) -> int | None:
        return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), None)

    local_rank = number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    local_size = number("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    return Member(
        rank,
        world_size,
        rank if local_rank is None else local_rank,
        world_size if local_size is None else local_size,
    )


def carry_out(plan: Plan, out: Path, force: bool, member: Member) -> int:
    """Measure with the other ranks, write the file on the first one, and return the exit code of this one."""
    try:
        results = measure(plan, member, _say)
        if results is not None:
            write_calibration(out, results, force)
    except CommprofError as error:
        if member.rank == 0:  # all of them have met it
            _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # of torch: a lost peer, a port that is taken
        first = str(error).strip().partition("\n")[0][:400]
        _say(f"error: rank {member.rank} of the calibration failed: {type(error).__name__}: {first}")
        return 1
    return 0


def _say(text: str) -> None:
    print(f"commprof: {text}", file=sys.stderr, flush=True)
