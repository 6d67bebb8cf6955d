"""Reads rank, world size and job id of this process from the launcher's environment variables. Standard library only.

These values are used before init_process_group, and for processes that never call it. Afterwards the values of torch
are used.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from commprof.trace.process import start_ticks

# Slurm uses step numbers from this value on for steps that srun did not start, such as batch scripts and shells.
_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0
_NO_IDS: Final = ("", "none", "static")  # the ids that torchrun uses for a job without an id


class Place(NamedTuple):
    """The place of a process in a job that another launcher started."""

    rank: int
    world_size: int
    launcher: str  # the name of the launcher or of its variables, for messages


class _Launcher(NamedTuple):
    """The environment variables in which a launcher sets rank and world size."""

    name: str
    rank: str
    world_size: tuple[str, ...]


# The variables of torchrun come first, because torchrun starts the ranks under srun or mpirun. The variables of MPI
# come before those of Slurm, because Slurm may have started only the daemons of MPI.
_LAUNCHERS: Final = (
    _Launcher("RANK and WORLD_SIZE", "RANK", ("WORLD_SIZE",)),
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    _Launcher("MVAPICH", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",)),
    _Launcher("PMI", "PMI_RANK", ("PMI_SIZE",)),
    _Launcher("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)


def place(environment: Mapping[str, str]) -> Place | None:
    """Return the rank that a launcher gave this process; None without a launcher.

    A single process has a rank only if RANK is set. A shell within a Slurm job, or a single process that MPI started,
    may start ranks of its own. Outside a step of ``srun``, Slurm's variables describe the allocation, not a process.
    """
    for launcher in _LAUNCHERS:
        rank = _number(environment.get(launcher.rank))
        size = next((n for name in launcher.world_size if (n := _number(environment.get(name)))), None)
        if rank is None or size is None:
            continue
        if launcher.name == "Slurm" and _slurm_step(environment) is None:
            continue
        if size > 1 or launcher.rank == "RANK":
            return Place(rank, size, launcher.name)
    return None


def job_id(environment: Mapping[str, str]) -> str | None:
    """Return a name that all processes of this job share, on all hosts; None if there is none.

    The name can be used as the name of a directory. A later job can have the same name if a person chose the name, or
    if the ranks of torchrun use the same rendezvous address again.
    """
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    if run_id not in _NO_IDS and not (_is_made_up(run_id) and _is_on_one_host(environment)):
        return _plain(run_id)
    step = _slurm_step(environment)
    job = environment.get("SLURM_JOB_ID")
    if job and step is not None:
        restarts = _number(environment.get("SLURM_RESTART_COUNT")) or 0
        return _plain(f"slurm-{job}.{step}" + (f"-{restarts}" if restarts else ""))
    if "OMPI_COMM_WORLD_RANK" in environment:
        namespace = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
        return _plain(f"mpi-{namespace}") if namespace else None
    return _meeting_point(environment)


def _meeting_point(environment: Mapping[str, str]) -> str | None:
    """Return the address and port of a torchrun job on several hosts, for a job without an id; None elsewhere."""
    groups = _number(environment.get("GROUP_WORLD_SIZE")) or 0
    if "TORCHELASTIC_RUN_ID" not in environment or groups < 2:
        return None
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    return _plain(f"{address}-{port}") if address and port else None


def agent_of(environment: Mapping[str, str]) -> str | None:
    """Return a text that identifies a torchrun job on one host among all jobs there; None for all other jobs.

    The text is the same after an elastic restart of the ranks.

    Args:
        environment: The environment of any rank of the job. All ranks give the same result.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or not _is_on_one_host(environment):
        return None
    agent = starter(environment)
    return f"{environment['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent} {start_ticks(agent)}"


def starter(environment: Mapping[str, str]) -> int:
    """Return the id of the process that started the ranks of this host.

    This is torchrun, even if there is a shell between torchrun and the rank. Without torchrun, it is the parent.
    """
    pid, own = os.getppid(), f"TORCHELASTIC_RUN_ID={environment.get('TORCHELASTIC_RUN_ID')}".encode()
    try:
        while pid > 1 and own in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return os.getppid()
    return pid


def _is_made_up(text: str) -> bool:
    """Return whether torchrun itself generated the id (--standalone), so that the id has no meaning for a person."""
    return re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", text) is not None


def _is_on_one_host(environment: Mapping[str, str]) -> bool:
    return environment.get("GROUP_WORLD_SIZE") == "1"


def is_unique(environment: Mapping[str, str]) -> bool:
    """Return whether no later job can have this job's :func:`job_id`, so that a directory of that name is its own."""
    return (job_id(environment) or "").startswith("slurm-")


def _slurm_step(environment: Mapping[str, str]) -> int | None:
    step = _number(environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID"))
    return step if step is not None and step < _FIRST_SPECIAL_STEP else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text.strip()) else None


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)
