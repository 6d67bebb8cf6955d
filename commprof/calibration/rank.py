"""One rank of a calibration. All ranks measure together, and the first rank writes the file."""

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

FORCE: Final = "force"  # the argument that allows an existing file to be replaced


def member_of(environment: Mapping[str, str], rank: int, world_size: int) -> Member:
    """Return the place of this process among the ranks, from the environment variables of launchers.

    Without such a variable, all ranks are assumed to be on one host.
    """

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
    """Return how many tasks of this ``srun`` step are on this host, or None if Slurm does not give the number.

    Slurm lists the tasks of each host in the form ``8(x2),4``.
    """
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
    """Measure with the other ranks, write the file on the first rank, and return the exit code of this rank."""
    try:
        results = measure(plan, member, _say)
        if results is not None:
            write_calibration(out, results, force)
    except CommprofError as error:
        # The error occurs on all ranks, or on all ranks of a host with too few GPUs. One message per host is enough.
        if member.local_rank == 0:
            _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    # torch raises errors of many types, for example for a lost peer or a port that is in use.
    except Exception as error:
        first = str(error).strip().partition("\n")[0][:400]
        _say(f"error: rank {member.rank} of the calibration failed: {type(error).__name__}: {first}")
        return 1
    return 0


def _say(text: str) -> None:
    print(f"commprof: {text}", file=sys.stderr, flush=True)
