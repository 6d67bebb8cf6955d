"""``configure`` and related functions with DeepSpeed's names, which set how activation checkpoints are stored."""

from __future__ import annotations

from typing import Any

from zero_runtime import comm, log
from zero_runtime import config as configuration
from zero_runtime.activation_checkpointing.model_parallel import ModelParallel, model_parallel
from zero_runtime.activation_checkpointing.process_settings import process
from zero_runtime.activation_checkpointing.random_states import (
    MODEL_PARALLEL,
    default_generator,
    get_rng_tracker,
)
from zero_runtime.comm import DataParallelGroup
from zero_runtime.configuration import all_keys
from zero_runtime.configuration.blocks.activation_block import BLOCK, ActivationCheckpointing
from zero_runtime.configuration.reading.checks import mapping


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how later checkpoints are stored, and replace all earlier settings. The signature is DeepSpeed's.

    Args:
        mpu_: An object that names the model-parallel ranks
            (:func:`~zero_runtime.activation_checkpointing.model_parallel.model_parallel`). With None, the ranks of the
            last call are used.
        deepspeed_config: A configuration, as a dict or the path of a JSON file. Only its block
            ``activation_checkpointing`` is used.
        partition_activations: Whether each model-parallel rank keeps only its shard. This argument and the following
            ones override the block.
        contiguous_checkpointing: The value of the key ``contiguous_memory_optimization``.
        num_checkpoints: The value of the key ``number_checkpoints``.
        checkpoint_in_cpu: The value of the key ``cpu_checkpointing``.
        synchronize: The value of the key ``synchronize_checkpoint_boundary``.
        profile: Whether the times of each checkpoint are printed.

    Raises:
        ConfigError: A setting or a combination of settings is invalid.
    """
    document = {} if deepspeed_config is None else configuration.load(deepspeed_config)
    block = all_keys.as_deepspeed_reads(document).get(BLOCK)
    arguments = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    explicit = {name: value for name, value in arguments.items() if value is not None}
    settings = ActivationCheckpointing().changed({**mapping(BLOCK, block or {}), **explicit})
    process.use(settings, process.ranks if mpu_ is None else model_parallel(mpu_))
    process.configured_by = "configure"


def configure_by(
    settings: ActivationCheckpointing, device: str, has_block: bool, tensor: DataParallelGroup | None = None
) -> None:
    """Apply the configuration of ``initialize``, unless :func:`configure` was called.

    Args:
        settings: The activation-checkpointing settings of the configuration.
        device: The type of the model's device.
        has_block: Whether the configuration has the block ``activation_checkpointing``.
        tensor: The tensor-parallel ranks, which have the same activations; None without tensor parallelism.
    """
    if process.configured_by == "configure":
        return
    process.use(settings, ModelParallel() if tensor is None else ModelParallel(tensor.rank, tensor))
    process.configured_by = "initialize" if has_block else None
    if comm.get_rank() == 0:
        for sentence in process.idle_settings(device):
            log.warning(sentence)


def is_configured() -> bool:
    """Return whether :func:`configure`, or ``initialize`` with the block ``activation_checkpointing``, was called."""
    return process.configured_by is not None


def reset() -> None:
    """Free the buffers of ``contiguous_memory_optimization``. Call it after forward passes without a backward pass."""
    if process.store is not None:
        process.store.reset()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Change only ``partition_activations``."""
    process.use(process.settings.changed({"partition_activations": partition_activation}), process.ranks)


def set_num_layers(nlayers: int) -> None:
    """Change only ``number_checkpoints``."""
    process.use(process.settings.changed({"number_checkpoints": nlayers}), process.ranks)


def forget() -> None:
    """Restore the default settings, and remove the model-parallel ranks."""
    process.use(ActivationCheckpointing(), ModelParallel())
    process.configured_by = None


def model_parallel_manual_seed(seed: int) -> None:
    """Seed the default generator with ``seed``, and the state ``model-parallel-rng`` with ``seed + 2718 + rank``.

    ``rank`` is the model-parallel rank. All other states are removed. DeepSpeed and Megatron-LM use the same seeds.
    """
    tracker = get_rng_tracker()
    tracker.reset()
    default_generator().manual_seed(seed)
    tracker.add(MODEL_PARALLEL, _own_seed(seed))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the state ``model-parallel-rng`` again, in the same way as :func:`model_parallel_manual_seed`."""
    with get_rng_tracker().fork():
        default_generator().manual_seed(_own_seed(seed))


def _own_seed(seed: int) -> int:
    return seed + 2718 + process.ranks.rank
