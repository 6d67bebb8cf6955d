"""The engine's accessors by DeepSpeed's names: values of the configuration, ranks, dtypes, absent features."""

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
    """A model with its configuration. Each method reads one value; none changes anything.

    Attributes:
        module: the model.
        parallelism: the axes of the ranks; its ``replica`` is this rank's number among those with different samples.
    """

    def __init__(self, config: RuntimeConfig, module: torch.nn.Module, parallelism: Parallelism) -> None:
        super().__init__()
        self._config = config
        self.module = module
        self.parallelism = parallelism

    # Batches.

    def train_batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch of one rank."""
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._config.gradient_accumulation_steps

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches."""
        return self._config.managed_gradient_accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        config = self._config
        return (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        )

    def dataloader_drop_last(self) -> bool:
        """Whether an incomplete last batch is dropped."""
        return self._config.dataloader_drop_last

    # ZeRO.

    def zero_optimization_stage(self) -> int:
        """0, 1, 2 or 3."""
        return self._config.zero.stage.number

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self._config.zero.stage.shards_optimizer

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self._config.zero.stage.shards_gradients

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self._config.zero.stage.shards_parameters

    def zero_reduce_scatter(self) -> bool:
        """The key reduce_scatter."""
        return self._config.zero.reduce_scatter

    def zero_multi_rank_bucket_allreduce(self) -> bool:
        """The key use_multi_rank_bucket_allreduce."""
        return self._config.zero.use_multi_rank_bucket_allreduce

    def zero_overlap_comm(self) -> bool:
        """Whether gradients are reduced during the backward pass."""
        return self._config.zero.overlap_comm

    def zero_reduce_bucket_size(self) -> int:
        """Elements of a gradient bucket."""
        return self._config.zero.reduce_bucket_size

    def zero_allgather_bucket_size(self) -> int | None:
        """Elements of a message that gathers parameters; None for all at once."""
        return self._config.zero.allgather_bucket_size

    def zero_allgather_partitions(self) -> bool:
        """Whether parameters are gathered, not broadcast."""
        return self._config.zero.allgather_partitions

    def zero_contiguous_gradients(self) -> bool:
        """Whether gradients are copied into one buffer."""
        return self._config.zero.contiguous_gradients

    def zero_round_robin_gradients(self) -> bool:
        """Whether parameters are assigned to the ranks in turn."""
        return self._config.zero.round_robin_gradients

    def zero_load_from_fp32_weights(self) -> bool:
        """Whether master weights come from a checkpoint's fp32 copy."""
        return self._config.zero.load_from_fp32_weights

    def zero_sub_group_size(self) -> int:
        """Elements of a sub-group, which the optimizer updates together (stage 3)."""
        return self._config.zero.sharding.sub_group_size

    def zero_prefetch_bucket_size(self) -> int:
        """Elements that are prefetched (stage 3)."""
        return self._config.zero.sharding.residency.prefetch

    def zero_param_persistence_threshold(self) -> int:
        """Largest number of elements of a persistent parameter (stage 3)."""
        return self._config.zero.sharding.residency.persistence

    def zero_model_persistence_threshold(self) -> int:
        """Largest number of elements of all persistent parameters (stage 3)."""
        return self._config.zero.sharding.residency.model_persistence

    def zero_max_live_parameters(self) -> int:
        """Gathered elements beyond which nothing is prefetched (stage 3)."""
        return self._config.zero.sharding.residency.max_live

    def zero_max_reuse_distance(self) -> int:
        """Largest distance, in elements, to a next use for which a parameter stays gathered (stage 3)."""
        return self._config.zero.sharding.residency.reuse_distance

    def zero_hpz_partition_size(self) -> int:
        """Ranks of the secondary partition (stage 3)."""
        return self._config.zero.sharding.residency.secondary_size

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether save_16bit_model may gather the model (stage 3)."""
        return self._config.zero.sharding.gather_16bit_weights_on_model_save

    def zero_allow_untested_optimizer(self) -> bool:
        """Whether optimizers that DeepSpeed has not tested are sharded."""
        return self._config.zero_allow_untested_optimizer

    # Precision and gradients.

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self._config.precision.bf16

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self._config.precision.fp16

    def fp16_auto_cast(self) -> bool:
        """Whether floating-point inputs are cast to fp16."""
        return self._config.precision.auto_cast

    def torch_autocast_enabled(self) -> bool:
        """Whether the forward pass runs under torch.autocast."""
        return self._config.precision.autocast_dtype is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """The dtype of torch.autocast."""
        name = self._config.precision.autocast_dtype
        return None if name is None else DTYPES[name]

    def initial_dynamic_scale(self) -> float:
        """The initial loss scale."""
        return self._config.precision.loss_scale.value

    def gradient_clipping(self) -> float:
        """The largest norm of gradients; 0 where they are not clipped."""
        return self._config.gradient_clipping

    def gradient_predivide_factor(self) -> float:
        """The divisor of gradients before they are summed."""
        return self._config.gradient_predivide_factor

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after they are summed."""
        return not self._config.prescale_gradients

    # Optimizer and schedule.

    def optimizer_name(self) -> str | None:
        """The optimizer's type in the configuration."""
        return None if self._config.optimizer is None else self._config.optimizer.type

    def optimizer_params(self) -> Mapping[str, Any] | None:
        """Its arguments."""
        return None if self._config.optimizer is None else self._config.optimizer.params

    def scheduler_name(self) -> str | None:
        """The schedule's type in the configuration."""
        return None if self._config.scheduler is None else self._config.scheduler.type

    def scheduler_params(self) -> Mapping[str, Any] | None:
        """Its arguments."""
        return None if self._config.scheduler is None else self._config.scheduler.params

    # Reports and checkpoints.

    def steps_per_print(self) -> float | None:
        """Steps between two progress lines; infinite for none."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the time of each part of a step is measured."""
        return self._config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Whether the memory in use is printed."""
        return self._config.memory_breakdown

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether tags of checkpoints are compared over the ranks."""
        return self._config.checkpoint_tag_validation != "Ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether different ones are an error."""
        return self._config.checkpoint_tag_validation == "Fail"

    # Ranks.

    def get_data_parallel_rank(self) -> int:
        """This rank's number among those with different samples."""
        return self.parallelism.replica

    def get_model_parallel_rank(self) -> int:
        """This rank among the ranks of one model."""
        model = self.parallelism.model
        return 0 if model is None else model.group.rank

    def get_tensor_parallel_rank(self) -> int:
        """This rank among those that share each tensor."""
        group = self.parallelism.tensor_group
        return 0 if group is None else group.rank

    def get_sequence_parallel_group(self) -> Any:
        """The ranks that share a sequence; None where this is the only one."""
        grid = self.parallelism.grid
        return None if grid is None or grid.size(SEQUENCE) == 1 else grid.group(SEQUENCE).group

    def autotp_size(self) -> int:
        """The number of tensor-parallel ranks in the configuration; 0 for none."""
        size = self._config.parallel.tp_size
        return size if size > 1 else 0

    # Experts.

    @property
    def has_moe_layers(self) -> bool:
        """Whether the model has layers of experts."""
        return bool(self.parallelism.experts)

    @property
    def num_experts(self) -> list[int]:
        """The number of experts of each such layer."""
        return [layer.ep_size * layer.num_local_experts for layer in layers_of(self.module).values()]

    # Dtypes.

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of the model, dtype in which gradients are accumulated)."""
        kinds = self._config.precision
        model = torch.float16 if kinds.fp16 else torch.bfloat16 if kinds.bf16 else torch.float32
        accumulated = kinds.grad_accum_dtype
        return model, model if accumulated is None else DTYPES[accumulated]

    def _mixed_precision_dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """(dtype that parameters are cast to, dtype of floating-point buffers); None leaves them as they are."""
        kind = "fp16" if self.fp16_enabled() else "bf16" if self.bfloat16_enabled() else None
        buffers = self._config.buffer_dtype
        return None if kind is None else DTYPES[kind], None if buffers is None else DTYPES[buffers]

    def _assert_valid_mixed_precision_config(self) -> None:
        """Raise ConfigError where ``data_types.param_dtype`` is not the dtype that the model trains in."""
        model = "fp16" if self.fp16_enabled() else "bf16" if self.bfloat16_enabled() else "fp32"
        check_param_dtype(self._config.param_dtype, model)

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
        """Always raises UnsupportedError: the optimizer's state has no file of its own."""
        raise UnsupportedError(
            "the file of the optimizer's state in a checkpoint is not in this version: each rank writes one file of all "
            "that it has; docs/checkpoints.md describes it"
        )

    # Keys.

    def dump_state(self) -> bool:
        """Whether the configuration was printed."""
        return self._config.dump_state

    def zero_offload_optimizer(self) -> Any:
        """The value of offload_optimizer; None where the optimizer's state is on the device."""
        return self._config.zero.offload_optimizer

    def zero_offload_param(self) -> Any:
        """The value of offload_param; None where parameters are on the device."""
        offload = self._config.zero.sharding.residency.offload
        return None if offload.device == "none" else offload

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state is in host memory."""
        offload = self._config.zero.offload_optimizer
        return offload is not None and offload.device == "cpu"

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether the optimizer's state is on NVMe."""
        offload = self._config.zero.offload_optimizer
        return offload is not None and offload.device == "nvme"

    def zero_partial_offload(self) -> float:
        """The share of the optimizer's state that is offloaded."""
        offload = self._config.zero.offload_optimizer
        return 1.0 if offload is None else offload.ratio

    def zero_compute_grad_norm(self) -> bool:
        """Whether the norm of the gradients is computed."""
        return self._config.zero.compute_grad_norm

    def zero_elastic_checkpoint(self) -> bool:
        """Whether checkpoints are elastic in DeepSpeed's sense; here all load at any world size."""
        return False

    def zero_ignore_unused_parameters(self) -> bool:
        """The value of ignore_unused_parameters, which acts at stages 1 and 2 with offload only."""
        return self._config.zero.ignore_unused_parameters

    # Features that are not in this version, and so are off.

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Embeddings with sparse gradients; none."""
        return set()

    def _off(self) -> bool:
        """Whether it is on; never."""
        return False

    autotuning_enabled = curriculum_learning_enabled = data_efficiency_enabled = flops_profiler_enabled = _off
    is_deepcompile_active = is_deepcompile_enabled = random_ltd_enabled = use_node_local_storage = _off

    def zero_quantized_weights(self) -> bool:
        """Whether sharded parameters are gathered in 8 bits."""
        return self._config.zero.sharding.residency.quantized or self._config.zero.quantized_weights

    def zero_quantized_nontrainable_weights(self) -> bool:
        """Whether frozen sharded parameters are gathered in 8 bits."""
        return self._config.zero.sharding.residency.quantized_frozen

    def zero_quantized_gradients(self) -> bool:
        """Whether the gradients of sharded parameters are reduced in 4 bits."""
        return self._config.zero.sharding.quantized_gradients or self._config.zero.quantized_gradients
