"""The whole configuration as typed values, and properties that depend on several of these values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_runtime.configuration.blocks.activation_block import ActivationCheckpointing
from zero_runtime.configuration.blocks.communication_block import CommunicationConfig
from zero_runtime.configuration.blocks.compression_block import GradientCompression
from zero_runtime.configuration.blocks.offload_block import effective_aio
from zero_runtime.configuration.blocks.parallel_block import ParallelConfig
from zero_runtime.configuration.blocks.pipeline_block import PipelineConfig
from zero_runtime.configuration.blocks.precision_block import PrecisionConfig
from zero_runtime.configuration.blocks.zero_block import ZeroConfig
from zero_runtime.gradient_reduction.gradient_buckets import Scaling
from zero_runtime.offload.tensor_files import AsynchronousIO


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer to construct: ``type`` is its name in the configuration, ``params`` its keyword arguments."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """The learning-rate schedule to construct: ``type`` is its name, ``params`` its keyword arguments."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """The settings of a monitor, which writes to the directory ``output_path``/``job_name``."""

    enabled: bool
    output_path: str
    job_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsLoggerConfig:
    """The settings of the communication log (:mod:`zero_runtime.groups.comm_log`)."""

    enabled: bool
    prof_all: bool
    prof_ops: tuple[str, ...]
    verbose: bool
    debug: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputConfig:
    """The settings for the measurement of samples per second (``zero_runtime.training.throughput.ThroughputTimer``)."""

    enabled: bool
    synchronized: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigValues:
    """The whole configuration for one world size, constructed by :class:`zero_runtime.config.RuntimeConfig`."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    managed_gradient_accumulation: bool
    optimizer: OptimizerConfig | None
    scheduler: SchedulerConfig | None
    zero_allow_untested_optimizer: bool
    gradient_clipping: float
    prescale_gradients: bool
    gradient_predivide_factor: float
    gradient_allreduce_op: str
    steps_per_print: float | None
    dataloader_drop_last: bool
    wall_clock_breakdown: bool
    memory_breakdown: bool
    disable_python_gc: bool
    traffic_contract: str
    dump_state: bool
    comms_logger: CommsLoggerConfig
    throughput: ThroughputConfig
    csv_monitor: MonitorConfig
    tensorboard: MonitorConfig
    activation_checkpointing: ActivationCheckpointing
    communication: CommunicationConfig
    gradient_compression: GradientCompression | None
    parallel: ParallelConfig
    pipeline: PipelineConfig
    precision: PrecisionConfig
    zero: ZeroConfig
    aio: AsynchronousIO
    checkpoint_tag_validation: str
    checkpoint_load_universal: bool
    given: Mapping[str, Any] = field(repr=False)
    notices: tuple[str, ...] = ()

    @property
    def param_dtype(self) -> str | None:
        """The value of ``data_types.param_dtype``. The blocks fp16 and bf16 determine the dtype of the parameters."""
        return self.precision.param_dtype

    @property
    def buffer_dtype(self) -> str | None:
        """The value of ``data_types.buffer_dtype``, to which floating-point buffers are cast; None to cast nothing."""
        return self.precision.buffer_dtype

    @property
    def sum_clipping(self) -> float:
        """The norm to which reduced gradients are clipped.

        The norm is 0 if each rank clips its own gradients before it compresses them.
        """
        compression = self.gradient_compression
        return 0.0 if compression is not None and compression.clip_before_residual else self.gradient_clipping

    @property
    def accumulates_whole(self) -> bool:
        """Whether a bf16 model's gradients are accumulated in fp32 without being sharded.

        This is the case at stage 1 with grad_accum_dtype fp32, if no optimizer is in host memory. For this
        case, DeepSpeed has a separate optimizer, which sends one message for all gradients.
        """
        stage = self.zero.stage
        wide = self.precision.bf16 and self.precision.grad_accum_dtype == "fp32"
        offload = self.zero.offload_optimizer
        if offload is not None and offload.device == "cpu":
            return False
        return wide and stage.shards_optimizer and not stage.shards_gradients

    def scaling(self, world_size: int) -> Scaling:
        """Return the factors by which the configured reduction scales gradients, and when it applies them.

        The order of the operations is that of DeepSpeed 0.19.8. The reductions to owners divide the bucket
        before any cast. Without contiguous gradients, auto divides between the cast and the sum. A plain
        all_reduce multiplies after the sum, or as the keys prescale_gradients and gradient_predivide_factor
        configure. Stage 3 always divides between the cast and the sum.
        """
        if self.gradient_allreduce_op == "sum":
            return Scaling()
        if self.zero.stage.shards_parameters:
            factor = 1.0 if self.prescale_gradients else self.gradient_predivide_factor
            return Scaling(divisor=world_size, factor_before=1.0 / factor, factor_after=factor)
        if self.zero.gradient_reduction != "all_reduce":
            return Scaling(bucket_divisor=world_size)
        joined = not self.zero.contiguous_gradients and not self.zero.explicit_reduction
        if self.prescale_gradients or (joined and self.zero.stage.shards_optimizer):
            return Scaling(divisor=world_size)
        factor = self.gradient_predivide_factor
        return Scaling(factor_before=1.0 / factor, factor_after=factor / world_size)

    def effective(self) -> dict[str, Any]:
        """Return the values in use, by their keys in a configuration. The record of a run contains them."""
        values = dataclasses.asdict(self)
        # In a configuration, some fields are in blocks or have other names.
        zero, kinds = values.pop("zero"), values.pop("precision")
        parallel, pipeline = values.pop("parallel"), values.pop("pipeline")
        values["checkpoint"] = {
            name: values.pop(f"checkpoint_{name}") for name in ("tag_validation", "load_universal")
        }
        values["timers"] = {"throughput": values.pop("throughput")}
        del (
            values["given"],
            values["notices"],
            zero["explicit_reduction"],
            zero["open_sizes"],
            zero["sharding"],
        )
        zero["zero_quantized_weights"] = zero.pop("quantized_weights")
        zero["zero_quantized_gradients"] = zero.pop("quantized_gradients")
        # Keys of stage 3 are shown only if they have an effect. At other stages, offload uses one of these keys.
        if self.zero.stage.shards_parameters:
            zero.update(self.zero.sharding.effective())
        elif self.zero.offload_optimizer is not None:
            zero["sub_group_size"] = self.zero.sharding.sub_group_size
        types = self.zero.partitioned_types
        del zero["partitioned_types"]
        zero["zero_allowed_param_types"] = None if types.allowed is None else list(types.allowed)
        zero["zero_force_param_types"] = list(types.whole)
        zero["stage"] = self.zero.stage.number
        # At stage 0, overlap_comm has an effect only if the configuration also names the reduction. The name is not
        # visible in these values.
        zero["overlap_comm"] &= self.zero.stage.shards_optimizer or self.zero.reduces_whole_in_buckets
        zero["reduce_scatter_impl"] = self.zero.reduce_scatter_impl or "auto"
        autocast = self.precision.autocast_dtype
        return {
            **values,
            "communication": self.communication.effective(),
            "communication_data_type": kinds["communication_data_type"],
            "fp16": self.precision.effective_fp16(),
            "bf16": {
                "enabled": kinds["bf16"],
                "check_grad_overflow": kinds["bf16"] and kinds["check_grad_overflow"],
                "bf16_master_weights_and_grads": kinds["bf16_masters"],
                "bf16_optimizer_states": kinds["bf16_masters"],
            },
            "fp16_override_modules": list(self.precision.fp32_modules),
            "data_types": {
                "grad_accum_dtype": kinds["grad_accum_dtype"],
                "buffer_dtype": kinds["buffer_dtype"],
                "keep_in_fp32_modules": "auto"
                if kinds["fp32_buffers"] is None
                else list(kinds["fp32_buffers"]),
            },
            "torch_autocast": {"enabled": True, "dtype": autocast} if autocast else {"enabled": False},
            "zero_optimization": zero,
            "pipeline": {
                name: pipeline[name] for name in ("activation_checkpoint_interval", "use_reentrant")
            },
            "pipeline_parallel": {
                "pp_size": pipeline["stages"],
                **{
                    name: pipeline[name]
                    for name in ("micro_batches", "partition_method", "schedule", "virtual_stages")
                },
            },
            "tp_size": parallel["tp_size"],
            "sequence_parallel_size": parallel["sequence_parallel_size"],
            "use_data_before_expert_parallelism": parallel["data_before_experts"],
            "tensor_parallel": {
                name: parallel[name] for name in ("plan", "partition_config", "sequence_parallel")
            },
            "aio": effective_aio(self.aio),
        }
