"""The model-parallel ranks that partition activations, which a script passes as its ``mpu``."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError

_PREFIXES: Final = ("get_tensor_model_parallel", "get_model_parallel")
_PARTS: Final = ("rank", "world_size", "group")


class ModelParallel(NamedTuple):
    """The position of this process among the ranks that share a model.

    Attributes:
        rank: The rank of this process within the group.
        group: The group of all ranks that share the model; None if this process is the only one.
    """

    rank: int = 0
    group: DataParallelGroup | None = None


def model_parallel(mpu: Any) -> ModelParallel:
    """Return the model-parallel ranks that ``mpu`` describes.

    ``mpu`` is an object with the methods ``get_model_parallel_rank``, ``get_model_parallel_world_size`` and
    ``get_model_parallel_group``. If it also has the methods ``get_tensor_model_parallel_...``, these are used instead.

    Raises:
        ConfigError: ``mpu`` has neither set of methods, or the methods contradict each other.
    """
    prefix = next((each for each in _PREFIXES if hasattr(mpu, f"{each}_rank")), _PREFIXES[-1])
    if not all(callable(getattr(mpu, f"{prefix}_{suffix}", None)) for suffix in _PARTS):
        methods = ", ".join(f"{_PREFIXES[1]}_{suffix}" for suffix in _PARTS)
        raise ConfigError(f"mpu is a {type(mpu).__name__}; expected an object with the methods {methods}")
    rank, size = (int(getattr(mpu, f"{prefix}_{suffix}")()) for suffix in ("rank", "world_size"))
    if size == 1:
        return ModelParallel(rank)
    group = DataParallelGroup(getattr(mpu, f"{prefix}_group")())
    if (group.rank, group.world_size) != (rank, size):
        raise ConfigError(
            f"mpu says that this is rank {rank} of {size} model-parallel ranks, but it is rank {group.rank} of the "
            f"{group.world_size} ranks of {prefix}_group()"
        )
    return ModelParallel(rank, group)
