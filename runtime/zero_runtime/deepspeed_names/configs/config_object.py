"""``deepspeed.runtime.config`` and related modules: the configuration as an object, and its enumerations."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from zero_runtime import comm
from zero_runtime import config as configuration
from zero_runtime.config import RuntimeConfig, batch_sizes
from zero_runtime.deepspeed_names.configs.block_configurations import namespace


class ZeroStageEnum(enum.IntEnum):
    """The ZeRO stages, with DeepSpeed's names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(enum.StrEnum):
    """The devices that store optimizer states and parameters."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """The states that ``engine.offload_states`` can move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroParamType(enum.Enum):
    """The ways in which a parameter can be partitioned. In this runtime, each rank has its shard."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ValidationMode:
    """The reactions to checkpoint tags that differ between ranks."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


class DeepSpeedConfig:
    """A checked configuration, with the attributes that scripts read.

    Args:
        config: A dict, a path, or a JSON object in base64.
        mpu: Megatron's object that describes the ranks that share a model. Its data-parallel world size is the
            number of replicas.
        mesh_device: A device mesh of torch. Without ``mpu``, the size of its dimension ``data_parallel`` is the
            number of replicas.

    Raises:
        ConfigError: The configuration cannot be used.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = configuration.load(config)
        self.global_rank = comm.get_rank() if comm.is_initialized() else 0
        ranks = comm.get_world_size() if comm.is_initialized() else 1
        self.world_size = _replicas(mpu, mesh_device, ranks)
        checked = RuntimeConfig.from_mapping(
            self._param_dict, ranks, _others(self._param_dict, ranks // self.world_size)
        )
        self.checked = checked
        effective = checked.effective()
        for name, value in effective.items():
            if not isinstance(value, Mapping):
                setattr(self, name, value)
        self.zero_config = namespace(effective["zero_optimization"])
        self.zero_optimization_stage = checked.zero.stage.number
        self.zero_enabled = checked.zero.stage.shards_optimizer
        self.float16_config = namespace(effective["fp16"])
        self.bfloat16_config = namespace(effective["bf16"])
        self.torch_autocast_enabled = checked.precision.autocast_dtype is not None
        for part in ("optimizer", "scheduler"):
            chosen = getattr(checked, part)
            setattr(self, f"{part}_name", None if chosen is None else chosen.type)
            setattr(self, f"{part}_params", None if chosen is None else dict(chosen.params))

    def _configure_train_batch_size(self) -> None:
        """Derive the batch sizes that are None from the other sizes, and check all sizes.

        Raises ConfigError if the sizes do not fit together.
        """
        names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
        sizes = batch_sizes({name: getattr(self, name) for name in names}, self.world_size)
        for name, value in zip(names, sizes, strict=True):
            setattr(self, name, value)

    def print_user_config(self) -> None:
        """Print the configuration that was passed, without defaults."""
        import json

        print(json.dumps(self._param_dict, indent=4, sort_keys=True))

    def print(self, name: str) -> None:
        """Print every key with the value that is in use."""
        print(f"{name}:")
        for key, value in sorted(self.checked.effective().items()):
            print(f"  {key} = {value}")


def _replicas(mpu: Any, mesh_device: Any, ranks: int) -> int:
    """Return the number of replicas among ``ranks``, which DeepSpeed calls world_size."""
    if mpu is not None:
        return int(mpu.get_data_parallel_world_size())
    if mesh_device is not None:
        return int(mesh_device.get_group(mesh_dim="data_parallel").size())
    return ranks


def _others(config: Mapping[str, Any], sharing: int) -> int:
    """Return the number of ranks of one model along the axes that are not in the configuration.

    Args:
        config: The configuration, which determines the sizes of the tensor-parallel and sequence-parallel axes.
        sharing: The number of ranks that share one model.
    """
    parallel = configuration.parallel_of(config)
    return max(1, sharing // (parallel.tp_size * parallel.sequence_parallel_size))
