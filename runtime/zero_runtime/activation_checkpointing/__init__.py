"""Activation checkpointing: tensors that are saved for the backward pass are dropped and recomputed in that pass.

``zero_runtime.checkpointing`` is this package. It has the names of ``deepspeed.checkpointing``::

    from zero_runtime import checkpointing

    checkpointing.configure(mpu, partition_activations=True)  # or the block activation_checkpointing of the config
    hidden = checkpointing.checkpoint(block, hidden)
"""

from __future__ import annotations

from zero_runtime.activation_checkpointing.checkpointing_settings import (
    configure,
    forget,
    is_configured,
    model_parallel_manual_seed,
    model_parallel_reconfigure_tp_seed,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
)
from zero_runtime.activation_checkpointing.random_states import RNGTracker, get_rng_tracker
from zero_runtime.activation_checkpointing.regions import (
    CheckpointFunction,
    checkpoint,
    non_reentrant_checkpoint,
)

# DeepSpeed's names contain CUDA, but they apply to any device.
CudaRNGStatesTracker = RNGTracker
get_cuda_rng_tracker = get_rng_tracker
model_parallel_cuda_manual_seed = model_parallel_manual_seed

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "RNGTracker",
    "checkpoint",
    "configure",
    "forget",
    "get_cuda_rng_tracker",
    "get_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]
