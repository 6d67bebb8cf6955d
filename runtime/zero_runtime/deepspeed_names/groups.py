"""``deepspeed.utils.groups``: which ranks share what. Here all ranks are data-parallel, and each model is on one rank.

Groups of one rank do not exist as objects: where DeepSpeed would give one, None stands for it.
"""

from __future__ import annotations

from typing import Any

from zero_runtime.deepspeed_names import comm
from zero_runtime.errors import UnsupportedError

mpu = None
mesh_device = None
expert_tensor_parallel_world_size = 1


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Accepted for one expert-parallel rank.

    Raises:
        UnsupportedError: for more, or with model parallelism.
    """
    if ep_size != 1 or mpu is not None:
        raise UnsupportedError(
            f"groups.initialize(ep_size={ep_size}) with experts or mpu is not in this version"
        )


def get_data_parallel_group() -> Any:
    """All ranks."""
    return comm.get_world_group()


def get_data_parallel_world_size() -> int:
    """The number of ranks."""
    return comm.get_world_size()


def get_data_parallel_rank() -> int:
    """This rank."""
    return comm.get_rank()


def get_data_parallel_ranks() -> list[int]:
    """All ranks."""
    return comm.get_all_ranks_from_group()


def get_single_group() -> None:
    """The group of this rank alone, as which None stands."""


def get_single_world_size() -> int:
    """1."""
    return 1


def get_single_rank() -> int:
    """0."""
    return 0


def get_source_rank() -> int:
    """The rank that a group of this rank alone begins with: itself."""
    return comm.get_rank()


def set_single_world_size(world_size: int) -> None:
    """Accepted for 1.

    Raises:
        UnsupportedError: for more.
    """
    if world_size != 1:
        raise UnsupportedError(f"a tensor-parallel world size of {world_size} is not in this version; only 1")


def set_single_rank(rank: int) -> None:
    """Accepted for 0.

    Raises:
        UnsupportedError: for another.
    """
    if rank != 0:
        raise UnsupportedError(f"a tensor-parallel rank of {rank} is not in this version; only 0")


def no_secondary_group() -> bool:
    """Whether there are secondary groups of ZeRO++ that can be asked for; never."""
    return False
