"""``deepspeed.utils.groups``: the process groups of the training that was initialized last.

Before ``initialize``, all ranks are data-parallel. Groups of one rank are not created. For such a group,
functions return None, while DeepSpeed returns a group.
"""

from __future__ import annotations

from typing import Any

from zero_runtime.deepspeed_names.ranks import comm_functions
from zero_runtime.errors import UnsupportedError
from zero_runtime.groups.parallelism import Parallelism, current, data_parallel
from zero_runtime.groups.process_grid import DATA, SEQUENCE

mpu = None
mesh_device = None
expert_tensor_parallel_world_size = 1


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Check that the number of expert-parallel ranks is 1. Other numbers are not supported here.

    Raises:
        UnsupportedError: ``ep_size`` is not 1, or ``mpu`` is not None.
    """
    if ep_size != 1 or mpu is not None:
        raise UnsupportedError(
            f"groups.initialize(ep_size={ep_size}) with experts or mpu is not in this version; pass mpu to "
            "deepspeed.initialize"
        )


def _shared() -> Parallelism:
    return current() or data_parallel()


def _group(*axes: str) -> Any:
    """Return torch's group along ``axes`` of the grid; None if the group has only one rank."""
    grid = _shared().grid
    if grid is None or all(grid.size(axis) == 1 for axis in axes):
        return None
    return grid.group(*axes).group


def _world_size(*axes: str) -> int:
    group = _group(*axes)
    return 1 if group is None else comm_functions.get_world_size(group)


def _rank(*axes: str) -> int:
    group = _group(*axes)
    return 0 if group is None else comm_functions.get_rank(group)


def get_data_parallel_group() -> Any:
    """Return the group of data-parallel ranks, which have different samples and the same part of the model."""
    parallelism = _shared()
    if parallelism.grid is not None:
        return parallelism.grid.group(DATA).group
    return comm_functions.get_world_group() if parallelism.data is None else parallelism.data


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks."""
    return _shared().replicas


def get_data_parallel_rank() -> int:
    """Return the rank of this process among the data-parallel ranks."""
    return _shared().replica


def get_data_parallel_ranks() -> list[int]:
    """Return the global ranks of the data-parallel ranks."""
    return comm_functions.get_all_ranks_from_group(get_data_parallel_group())


def get_sequence_data_parallel_group() -> Any:
    """Return the group of ranks over which gradients are summed."""
    parallelism = _shared()
    return comm_functions.get_world_group() if parallelism.data is None else parallelism.data


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of ranks over which gradients are summed."""
    return comm_functions.get_world_size(get_sequence_data_parallel_group())


def get_sequence_data_parallel_rank() -> int:
    """Return the rank of this process among the ranks over which gradients are summed."""
    return comm_functions.get_rank(get_sequence_data_parallel_group())


def get_sequence_parallel_group() -> Any:
    """Return the group of sequence-parallel ranks."""
    return _group(SEQUENCE)


def get_sequence_parallel_world_size() -> int:
    """Return the number of sequence-parallel ranks."""
    return _world_size(SEQUENCE)


def get_sequence_parallel_rank() -> int:
    """Return the rank of this process among the sequence-parallel ranks."""
    return _rank(SEQUENCE)


def get_model_parallel_group() -> Any:
    """Return the group of ranks that one model is divided over."""
    model = _shared().model
    return None if model is None else model.group.group


def get_model_parallel_world_size() -> int:
    """Return the number of ranks that one model is divided over."""
    model = _shared().model
    return 1 if model is None else model.group.world_size


def get_model_parallel_rank() -> int:
    """Return the rank of this process among the ranks that one model is divided over."""
    model = _shared().model
    return 0 if model is None else model.group.rank


def get_tensor_model_parallel_group() -> Any:
    """Return the group of tensor-parallel ranks."""
    tensor = _shared().tensor_group
    return None if tensor is None else tensor.group


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of tensor-parallel ranks."""
    tensor = _shared().tensor_group
    return 1 if tensor is None else tensor.world_size


def get_tensor_model_parallel_rank() -> int:
    """Return the rank of this process among the tensor-parallel ranks."""
    tensor = _shared().tensor_group
    return 0 if tensor is None else tensor.rank


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first tensor-parallel rank."""
    tensor = _shared().tensor_group
    return comm_functions.get_rank() if tensor is None else tensor.global_ranks[0]


def get_single_group() -> None:
    """Return None, which represents the group of this rank alone."""


def get_single_world_size() -> int:
    """Return 1, the number of ranks in the group of this rank alone."""
    return 1


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Check that ``world_size`` is the actual number of tensor-parallel ranks, which cannot be changed here.

    Raises:
        UnsupportedError: ``world_size`` is a different number.
    """
    if world_size != get_tensor_model_parallel_world_size():
        raise UnsupportedError(
            f"this call cannot set the tensor-parallel world size to {world_size}; set tp_size in the configuration"
        )


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Check that ``rank`` is the actual tensor-parallel rank, which cannot be changed here.

    Raises:
        UnsupportedError: ``rank`` is a different rank.
    """
    if rank != get_tensor_model_parallel_rank():
        raise UnsupportedError(
            f"this call cannot set the tensor-parallel rank to {rank}; set tp_size in the configuration"
        )


def no_secondary_group() -> bool:
    """Return whether the secondary groups of ZeRO++ are available, which is never the case here."""
    return False
