"""The engine's accessors of configuration values, by DeepSpeed's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError
from zero_runtime.optimizer_step.dtypes import DTYPES
from zero_runtime.training.engine_queries import Answers


class Settings(Answers):
    """The accessors, and two methods that change the batch size.

    Attributes:
        world_size: the number of data-parallel ranks.
    """

    _config: RuntimeConfig
    world_size: int

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

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step by changing the number of micro-batches, from the next step on.

        Raises:
            ConfigError: they are not a multiple of one micro-batch of all ranks.
        """
        at_once = self._config.train_micro_batch_size_per_gpu * self.world_size
        if train_batch_size < at_once or train_batch_size % at_once:
            raise ConfigError(
                f"train_batch_size {train_batch_size} is not a multiple of {at_once}, the samples of one micro-batch of "
                f"{self.world_size} ranks; choose a multiple of {at_once}"
            )
        self._config = dataclasses.replace(
            self._config,
            train_batch_size=train_batch_size,
            gradient_accumulation_steps=train_batch_size // at_once,
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a micro-batch and so of a step; the number of micro-batches stays."""
        steps = self._config.gradient_accumulation_steps
        self._config = dataclasses.replace(
            self._config,
            train_micro_batch_size_per_gpu=micro_batch_size,
            train_batch_size=micro_batch_size * steps * self.world_size,
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
