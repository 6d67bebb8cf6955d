"""Accessors of the engine under DeepSpeed's names: configuration values, ranks, dtypes and absent features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration.blocks.precision_block import check_param_dtype
from zero_runtime.errors import UnsupportedError
from zero_runtime.experts.layer import layers_of
from zero_runtime.groups.parallelism import Parallelism
from zero_runtime.groups.process_grid import SEQUENCE
from zero_runtime.optimizer_step.dtypes import DTYPES


class Accessors(torch.nn.Module):
    """A model with its configuration. Each method returns one value and changes nothing.

    Attributes:
        module: The model.
        parallelism: The axes of the ranks. ``parallelism.replica`` is the number of this rank's replica, where
            different replicas train on different samples.
    """

    def __init__(self, config: RuntimeConfig, module: torch.nn.Module, parallelism: Parallelism) -> None:
        super().__init__()
        self._config = config
        self.module = module
        self.parallelism = parallelism

    # Batches.

    def train_batch_size(self) -> int:
        """Return the number of samples of a step, over all ranks."""
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples of a micro-batch of one rank."""
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches of a step."""
        return self._config.gradient_accumulation_steps

    def managed_gradient_accumulation(self) -> bool:
        """Return whether the engine counts micro-batches."""
        return self._config.managed_gradient_accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        config = self._config
        return (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        )

    def dataloader_drop_last(self) -> bool:
        """Return whether an incomplete last batch is dropped."""
        return self._config.dataloader_drop_last

    # ZeRO.

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage: 0, 1, 2 or 3."""
        return self._config.zero.stage.number

    def zero_optimization(self) -> bool:
        """Return whether the optimizer state is sharded (stages 1 to 3)."""
        return self._config.zero.stage.shards_optimizer

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded."""
        return self._config.zero.stage.shards_gradients

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded."""
        return self._config.zero.stage.shards_parameters

    def zero_reduce_scatter(self) -> bool:
        """Return the value of the key reduce_scatter."""
        return self._config.zero.reduce_scatter

    def zero_multi_rank_bucket_allreduce(self) -> bool:
        """Return the value of the key use_multi_rank_bucket_allreduce."""
        return self._config.zero.use_multi_rank_bucket_allreduce

    def zero_overlap_comm(self) -> bool:
        """Return whether gradients are reduced during the backward pass."""
        return self._config.zero.overlap_comm

    def zero_reduce_bucket_size(self) -> int:
        """Return the number of elements of a gradient bucket."""
        return self._config.zero.reduce_bucket_size

    def zero_allgather_bucket_size(self) -> int | None:
        """Return the number of elements of a message that gathers parameters. None means one message for all."""
        return self._config.zero.allgather_bucket_size

    def zero_allgather_partitions(self) -> bool:
        """Return whether parameters are gathered instead of broadcast."""
        return self._config.zero.allgather_partitions

    def zero_contiguous_gradients(self) -> bool:
        """Return whether gradients are copied into one buffer."""
        return self._config.zero.contiguous_gradients

    def zero_round_robin_gradients(self) -> bool:
        """Return whether parameters are assigned to the ranks in turn."""
        return self._config.zero.round_robin_gradients

    def zero_load_from_fp32_weights(self) -> bool:
        """Return whether master weights come from a checkpoint's fp32 copy."""
        return self._config.zero.load_from_fp32_weights

    def zero_sub_group_size(self) -> int:
        """Return the number of elements of a sub-group, which the optimizer updates together (stage 3)."""
        return self._config.zero.sharding.sub_group_size

    def zero_prefetch_bucket_size(self) -> int:
        """Return the number of elements that are prefetched (stage 3)."""
        return self._config.zero.sharding.residency.prefetch

    def zero_param_persistence_threshold(self) -> int:
        """Return the largest number of elements of a persistent parameter (stage 3)."""
        return self._config.zero.sharding.residency.persistence

    def zero_model_persistence_threshold(self) -> int:
        """Return the largest number of elements of all persistent parameters together (stage 3)."""
        return self._config.zero.sharding.residency.model_persistence

    def zero_max_live_parameters(self) -> int:
        """Return the number of gathered elements above which nothing is prefetched (stage 3)."""
        return self._config.zero.sharding.residency.max_live

    def zero_max_reuse_distance(self) -> int:
        """Return the largest distance to the next use, in elements, at which a parameter stays gathered (stage 3)."""
        return self._config.zero.sharding.residency.reuse_distance

    def zero_hpz_partition_size(self) -> int:
        """Return the number of ranks of the secondary partition (stage 3)."""
        return self._config.zero.sharding.residency.secondary_size

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether save_16bit_model may gather the model (stage 3)."""
        return self._config.zero.sharding.gather_16bit_weights_on_model_save

    def zero_allow_untested_optimizer(self) -> bool:
        """Return whether optimizers that DeepSpeed has not tested are sharded."""
        return self._config.zero_allow_untested_optimizer

    # Precision and gradients.

    def bfloat16_enabled(self) -> bool:
        """Return whether parameters are bf16."""
        return self._config.precision.bf16

    def fp16_enabled(self) -> bool:
        """Return whether parameters are fp16."""
        return self._config.precision.fp16

    def fp16_auto_cast(self) -> bool:
        """Return whether floating-point inputs are cast to fp16."""
        return self._config.precision.auto_cast

    def torch_autocast_enabled(self) -> bool:
        """Return whether the forward pass runs under torch.autocast."""
        return self._config.precision.autocast_dtype is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of torch.autocast."""
        name = self._config.precision.autocast_dtype
        return None if name is None else DTYPES[name]

    def initial_dynamic_scale(self) -> float:
        """Return the initial loss scale."""
        return self._config.precision.loss_scale.value

    def gradient_clipping(self) -> float:
        """Return the largest norm of gradients, or 0 if gradients are not clipped."""
        return self._config.gradient_clipping

    def gradient_predivide_factor(self) -> float:
        """Return the number by which gradients are divided before they are summed."""
        return self._config.gradient_predivide_factor

    def postscale_gradients(self) -> bool:
        """Return whether gradients are divided after they are summed."""
        return not self._config.prescale_gradients

    # Optimizer and schedule.

    def optimizer_name(self) -> str | None:
        """Return the optimizer's type in the configuration."""
        return None if self._config.optimizer is None else self._config.optimizer.type

    def optimizer_params(self) -> Mapping[str, Any] | None:
        """Return the arguments of the optimizer in the configuration."""
        return None if self._config.optimizer is None else self._config.optimizer.params

    def scheduler_name(self) -> str | None:
        """Return the type of the learning-rate schedule in the configuration."""
        return None if self._config.scheduler is None else self._config.scheduler.type

    def scheduler_params(self) -> Mapping[str, Any] | None:
        """Return the arguments of the learning-rate schedule in the configuration."""
        return None if self._config.scheduler is None else self._config.scheduler.params

    # Reports and checkpoints.

    def steps_per_print(self) -> float | None:
        """Return the number of steps between two progress lines. Infinity means no progress lines."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Return whether the time of each part of a step is measured."""
        return self._config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Return whether the memory in use is printed."""
        return self._config.memory_breakdown

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Return whether the tags of a checkpoint are compared over the ranks."""
        return self._config.checkpoint_tag_validation != "Ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Return whether different tags on different ranks are an error."""
        return self._config.checkpoint_tag_validation == "Fail"

    # Ranks.

    def get_data_parallel_rank(self) -> int:
        """Return the number of this rank's replica. Different replicas train on different samples."""
        return self.parallelism.replica

    def get_model_parallel_rank(self) -> int:
        """Return the number of this rank among the ranks that share one model."""
        model = self.parallelism.model
        return 0 if model is None else model.group.rank

    def get_tensor_parallel_rank(self) -> int:
        """Return the number of this rank among the tensor-parallel ranks."""
        group = self.parallelism.tensor_group
        return 0 if group is None else group.rank

    def get_sequence_parallel_group(self) -> Any:
        """Return the process group of the ranks that share a sequence, or None if sequences are not shared."""
        grid = self.parallelism.grid
        return None if grid is None or grid.size(SEQUENCE) == 1 else grid.group(SEQUENCE).group

    def autotp_size(self) -> int:
        """Return the number of tensor-parallel ranks in the configuration, or 0 without tensor parallelism."""
        size = self._config.parallel.tp_size
        return size if size > 1 else 0

    # Experts.

    @property
    def has_moe_layers(self) -> bool:
        """Whether the model has layers of experts."""
        return bool(self.parallelism.experts)

    @property
    def num_experts(self) -> list[int]:
        """The number of experts of each layer of experts."""
        return [layer.ep_size * layer.num_local_experts for layer in layers_of(self.module).values()]

    # Dtypes.

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the model and the dtype in which gradients are accumulated."""
        kinds = self._config.precision
        model = torch.float16 if kinds.fp16 else torch.bfloat16 if kinds.bf16 else torch.float32
        accumulated = kinds.grad_accum_dtype
        return model, model if accumulated is None else DTYPES[accumulated]

    def _mixed_precision_dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Return the dtypes to which parameters and floating-point buffers are cast. None leaves them unchanged."""
        kind = "fp16" if self.fp16_enabled() else "bf16" if self.bfloat16_enabled() else None
        buffers = self._config.buffer_dtype
        return None if kind is None else DTYPES[kind], None if buffers is None else DTYPES[buffers]

    def _assert_valid_mixed_precision_config(self) -> None:
        """Raise ConfigError if ``data_types.param_dtype`` is not the dtype in which the model trains."""
        model = "fp16" if self.fp16_enabled() else "bf16" if self.bfloat16_enabled() else "fp32"
        check_param_dtype(self._config.param_dtype, model)

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
        """Raise UnsupportedError, because no separate file contains the optimizer's state."""
        raise UnsupportedError(
            "a separate checkpoint file of the optimizer state is not in this version: each rank writes all of its "
            "state to one file; see docs/checkpoints.md"
        )

    # Keys.

    def dump_state(self) -> bool:
        """Return whether the configuration was printed."""
        return self._config.dump_state

    def zero_offload_optimizer(self) -> Any:
        """Return the value of offload_optimizer, or None if the optimizer's state is on the device."""
        return self._config.zero.offload_optimizer

    def zero_offload_param(self) -> Any:
        """Return the value of offload_param, or None if parameters are on the device."""
        offload = self._config.zero.sharding.residency.offload
        return None if offload.device == "none" else offload

    def zero_cpu_offload(self) -> bool:
        """Return whether the optimizer's state is in host memory."""
        offload = self._config.zero.offload_optimizer
        return offload is not None and offload.device == "cpu"

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_nvme_offload_optimizer(self) -> bool:
        """Return whether the optimizer's state is on NVMe."""
        offload = self._config.zero.offload_optimizer
        return offload is not None and offload.device == "nvme"

    def zero_partial_offload(self) -> float:
        """Return the share of the optimizer's state that is offloaded. Without offload the value is 1."""
        offload = self._config.zero.offload_optimizer
        return 1.0 if offload is None else offload.ratio

    def zero_compute_grad_norm(self) -> bool:
        """Return whether the norm of the gradients is computed."""
        return self._config.zero.compute_grad_norm

    def zero_elastic_checkpoint(self) -> bool:
        """Return False: checkpoints are not elastic in DeepSpeed's sense. Every one loads at any world size."""
        return False

    def zero_ignore_unused_parameters(self) -> bool:
        """Return the value of ignore_unused_parameters, which has an effect only at stages 1 and 2 with offload."""
        return self._config.zero.ignore_unused_parameters

    # Features that are not in this version, and so are off.

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The names of embeddings with sparse gradients, always empty."""
        return set()

    def _off(self) -> bool:
        """Return False, because the feature is not in this version."""
        return False

    autotuning_enabled = curriculum_learning_enabled = data_efficiency_enabled = flops_profiler_enabled = _off
    is_deepcompile_active = is_deepcompile_enabled = random_ltd_enabled = use_node_local_storage = _off

    def zero_quantized_weights(self) -> bool:
        """Return whether sharded parameters are gathered in 8 bits."""
        return self._config.zero.sharding.residency.quantized or self._config.zero.quantized_weights

    def zero_quantized_nontrainable_weights(self) -> bool:
        """Return whether frozen sharded parameters are gathered in 8 bits."""
        return self._config.zero.sharding.residency.quantized_frozen

    def zero_quantized_gradients(self) -> bool:
        """Return whether the gradients of sharded parameters are reduced in 4 bits."""
        return self._config.zero.sharding.quantized_gradients or self._config.zero.quantized_gradients
