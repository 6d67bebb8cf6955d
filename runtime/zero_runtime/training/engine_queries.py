"""Methods by which libraries query an engine: ranks, dtypes, offload, features that are absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration.blocks.precision_block import check_param_dtype
from zero_runtime.errors import UnsupportedError
from zero_runtime.experts.layer import layers_of
from zero_runtime.groups.parallelism import Parallelism
from zero_runtime.groups.process_grid import SEQUENCE
from zero_runtime.optimizer_step.dtypes import DTYPES, cast_tensors


class Answers:
    """The engine's queries, by DeepSpeed's names; most return one value.

    Attributes:
        global_rank: this process's rank.
        parallelism: the axes of the ranks.
    """

    _config: RuntimeConfig
    global_rank: int
    parallelism: Parallelism
    module: torch.nn.Module
    _residency: Any
    fp16_enabled: Callable[[], bool]
    bfloat16_enabled: Callable[[], bool]

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

    def _cast_module_mixed_precision(
        self, param_dtype: torch.dtype | None, buffer_dtype: torch.dtype | None, is_zero_init_model: bool
    ) -> None:
        """Cast the model's parameters, unless they are sharded already, and its buffers; None leaves them."""
        if param_dtype is not None and not is_zero_init_model:
            cast_tensors(self.module.parameters(), param_dtype)
        if buffer_dtype is not None:
            cast_tensors(self.module.buffers(), buffer_dtype)

    def clip_fp32_gradients(self) -> None:
        """Nothing: ``step`` clips, by the key gradient_clipping."""

    # Gradients and parameters.

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Nothing: ``backward`` has reduced the gradients of the last micro-batch."""

    def empty_partition_cache(self) -> None:
        """Release the gathered parameters (stage 3)."""
        if self._residency is not None:
            self._residency.release_all()

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
