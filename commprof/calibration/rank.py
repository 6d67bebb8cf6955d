"""One rank of a calibration: measures with the other ranks; the first rank writes the file."""

from __future__ import annotations

import re
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

    local_rank = number(
        "LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "SLURM_LOCALID",
    )
    local_size = number(
        "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"
    )
    if local_size is None:
        local_size = _slurm_local_size(environment, world_size)
    return Member(
        rank,
        world_size,
        rank if local_rank is None else local_rank,
        world_size if local_size is None else local_size,
    )


def _slurm_local_size(environment: Mapping[str, str], world_size: int) -> int | None:
    """The tasks of this step of ``srun`` on this host; Slurm lists them by host, as ``8(x2),4``. None if it does not."""
    sizes: list[int] = []
    for field in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", field.strip())
        if match is None:
            return None
        sizes += [int(match[1])] * int(match[2] or 1)
    host = environment.get("SLURM_NODEID", "")
    is_known = sum(sizes) == world_size and host.isdecimal() and int(host) < len(sizes)
    return sizes[int(host)] if is_known else None


def carry_out(plan: Plan, out: Path, force: bool, member: Member) -> int:
    """Measure with the other ranks, write the file on the first one, and return the exit code of this one."""
    try:
        results = measure(plan, member, _say)
        if results is not None:
            write_calibration(out, results, force)
    except CommprofError as error:
        if member.local_rank == 0:  # all ranks have met it, or those of this host: its GPUs are too few
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
