"""``deepspeed.utils.groups``: the process groups of the training that was initialised last.

Before ``initialize`` all ranks are data-parallel. If no axis has more than one rank, groups of one rank are not
created: functions return None where DeepSpeed would return one.
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
    """Accepted only for one expert-parallel rank.

    Raises:
        UnsupportedError: for more, or with model parallelism.
    """
    if ep_size != 1 or mpu is not None:
        raise UnsupportedError(
            f"groups.initialize(ep_size={ep_size}) with experts or mpu is not in this version; pass mpu to "
            "deepspeed.initialize"
        )


def _shared() -> Parallelism:
    return current() or data_parallel()


def _group(*axes: str) -> Any:
    """torch's group along ``axes`` of the grid; None if it has one rank."""
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
    """The data-parallel ranks: those with different samples and the same part of the model."""
    parallelism = _shared()
    if parallelism.grid is not None:
        return parallelism.grid.group(DATA).group
    return comm_functions.get_world_group() if parallelism.data is None else parallelism.data


def get_data_parallel_world_size() -> int:
    """The number of those."""
    return _shared().replicas


def get_data_parallel_rank() -> int:
    """This rank among them."""
    return _shared().replica


def get_data_parallel_ranks() -> list[int]:
    """Their global ranks."""
    return comm_functions.get_all_ranks_from_group(get_data_parallel_group())


def get_sequence_data_parallel_group() -> Any:
    """The ranks that gradients are summed over."""
    parallelism = _shared()
    return comm_functions.get_world_group() if parallelism.data is None else parallelism.data


def get_sequence_data_parallel_world_size() -> int:
    """The number of those."""
    return comm_functions.get_world_size(get_sequence_data_parallel_group())


def get_sequence_data_parallel_rank() -> int:
    """This rank among them."""
    return comm_functions.get_rank(get_sequence_data_parallel_group())


def get_sequence_parallel_group() -> Any:
    """The sequence-parallel ranks."""
    return _group(SEQUENCE)


def get_sequence_parallel_world_size() -> int:
    """The number of those."""
    return _world_size(SEQUENCE)


def get_sequence_parallel_rank() -> int:
    """This rank among them."""
    return _rank(SEQUENCE)


def get_model_parallel_group() -> Any:
    """The ranks that one model is divided over."""
    model = _shared().model
    return None if model is None else model.group.group


def get_model_parallel_world_size() -> int:
    """The number of those."""
    model = _shared().model
    return 1 if model is None else model.group.world_size


def get_model_parallel_rank() -> int:
    """This rank among them."""
    model = _shared().model
    return 0 if model is None else model.group.rank


def get_tensor_model_parallel_group() -> Any:
    """The tensor-parallel ranks."""
    tensor = _shared().tensor_group
    return None if tensor is None else tensor.group


def get_tensor_model_parallel_world_size() -> int:
    """The number of those."""
    tensor = _shared().tensor_group
    return 1 if tensor is None else tensor.world_size


def get_tensor_model_parallel_rank() -> int:
    """This rank among them."""
    tensor = _shared().tensor_group
    return 0 if tensor is None else tensor.rank


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first of them."""
    tensor = _shared().tensor_group
    return comm_functions.get_rank() if tensor is None else tensor.global_ranks[0]


def get_single_group() -> None:
    """None, which stands for the group of this rank alone."""


def get_single_world_size() -> int:
    """1."""
    return 1


def set_tensor_model_parallel_world_size(world_size: int) -> None:
    """Accepted only for the actual size.

    Raises:
        UnsupportedError: for another.
    """
    if world_size != get_tensor_model_parallel_world_size():
        raise UnsupportedError(
            f"a tensor-parallel world size of {world_size} is not set here; set tp_size in the configuration"
        )


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Accepted only for the actual rank.

    Raises:
        UnsupportedError: for another.
    """
    if rank != get_tensor_model_parallel_rank():
        raise UnsupportedError(
            f"a tensor-parallel rank of {rank} is not set here; set tp_size in the configuration"
        )


def no_secondary_group() -> bool:
    """Whether secondary groups of ZeRO++ are available here; never."""
    return False
