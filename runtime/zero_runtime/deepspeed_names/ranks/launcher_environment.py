"""Environment variables that launchers set: the ranks, and the file of accelerate for other hosts."""

from __future__ import annotations

import os


def environment_file() -> str:
    """Return the file in which ``accelerate launch`` passes variables to other hosts through DeepSpeed's launcher."""
    return os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def get_local_rank_from_launcher() -> int:
    """Return the local rank of this process from the environment; 0 without a launcher."""
    return _launcher_number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", 0)


def get_world_rank_from_launcher() -> int:
    """Return the rank of this process from the environment; 0 without a launcher."""
    return _launcher_number("RANK", "OMPI_COMM_WORLD_RANK", 0)


def get_world_size_from_launcher() -> int:
    """Return the number of ranks from the environment; 1 without a launcher."""
    return _launcher_number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", 1)


def _launcher_number(name: str, other: str, default: int) -> int:
    return int(os.environ.get(name) or os.environ.get(other) or default)
