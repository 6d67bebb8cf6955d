"""The configuration: DeepSpeed's JSON, checked and typed, with all defaults.

``load`` reads a path, a mapping or ``args.deepspeed_config``; ``RuntimeConfig.from_mapping`` is pure. All keys and their
handling are in :mod:`zero_runtime.configuration.keys`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_runtime.configuration import keys
from zero_runtime.configuration.blocks.activation_block import ActivationCheckpointing
from zero_runtime.configuration.blocks.communication_block import (
    CommunicationConfig,
    check_delay,
    read_communication,
)
from zero_runtime.configuration.blocks.compression_block import (
    GradientCompression,
    check_compression,
    read_compression,
)
from zero_runtime.configuration.blocks.offload_block import effective_aio, read_aio
from zero_runtime.configuration.blocks.offload_param_block import modern as modern_zero
from zero_runtime.configuration.blocks.parallel_block import ParallelConfig, check_parallel, read_parallel
from zero_runtime.configuration.blocks.pipeline_block import PipelineConfig, accumulation_steps, read_pipeline
from zero_runtime.configuration.blocks.precision_block import PrecisionConfig, read_precision
from zero_runtime.configuration.blocks.sharding_block import note_two_names
from zero_runtime.configuration.blocks.zero_block import ZeroConfig, read_zero
from zero_runtime.configuration.combinations import check, note_contradictions, whole_gradients
from zero_runtime.configuration.reading import document
from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.gradient_buckets import Scaling
from zero_runtime.offload.tensor_files import AsynchronousIO


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer to construct: ``type`` as in the config, ``params`` its keyword arguments."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """The learning-rate schedule to construct."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorConfig:
    """The directory that a monitor writes to: ``output_path``/``job_name``."""

    enabled: bool
    output_path: str
    job_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsLoggerConfig:
    """Which collectives are timed, and how they are printed: see :mod:`zero_runtime.groups.comm_log`."""

    enabled: bool
    prof_all: bool
    prof_ops: tuple[str, ...]
    verbose: bool
    debug: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputConfig:
    """The measurement of samples per second: see :class:`zero_runtime.training.throughput.ThroughputTimer`."""

    enabled: bool
    synchronized: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """The whole configuration for one world size."""

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

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], world_size: int, stages: int = 1) -> RuntimeConfig:
        """Check ``values`` and fill in the defaults.

        Args:
            values: the configuration.
            world_size: all ranks that train.
            stages: of a pipeline. With the other axes in ``values`` they determine the number of replicas.

        Raises:
            ConfigError: a key or value is wrong.
            UnsupportedError: a key or value exists in DeepSpeed but not in this version.
        """
        notices: list[str] = []
        # Old forms first: everything below knows present names only. Then keys that are accepted without an effect are
        # noted, so that the user knows.
        values = _modern(values, notices)
        top = keys.read(values)
        notices += [f"{name} has no effect here: {note}" for name, note in keys.inert_keys(values)]
        note_two_names(values.get("zero_optimization", {}), notices)
        zero = read_zero(top["zero_optimization"], top["disable_allgather"])
        if not zero.stage.shards_parameters:
            idle = keys.stage_3_only(values)
            notices += [f"{name} has no effect here: it acts at stage 3 only" for name in idle]
        # The batch sizes depend on the number of replicas, so the axes are read before them.
        parallel, pipeline = read_parallel(top), read_pipeline(top)
        top["gradient_accumulation_steps"] = accumulation_steps(
            pipeline.micro_batches, top["gradient_accumulation_steps"]
        )
        micro, accumulation, batch = _shared_batch_sizes(
            top, parallel, parallel.replicas(world_size, stages), notices
        )
        config = cls(
            train_batch_size=batch,
            train_micro_batch_size_per_gpu=micro,
            gradient_accumulation_steps=accumulation,
            managed_gradient_accumulation=top["managed_gradient_accumulation"],
            optimizer=_optimizer(top["optimizer"]),
            scheduler=_scheduler(top["scheduler"], values.get("scheduler")),
            zero_allow_untested_optimizer=top["zero_allow_untested_optimizer"],
            gradient_clipping=top["gradient_clipping"],
            prescale_gradients=top["prescale_gradients"],
            gradient_predivide_factor=top["gradient_predivide_factor"],
            gradient_allreduce_op=top["gradient_allreduce_op"],
            steps_per_print=top["steps_per_print"],
            dataloader_drop_last=top["dataloader_drop_last"],
            wall_clock_breakdown=top["wall_clock_breakdown"],
            memory_breakdown=top["memory_breakdown"],
            disable_python_gc=top["disable_python_gc"],
            comms_logger=CommsLoggerConfig(**top["comms_logger"]),
            throughput=ThroughputConfig(**top["timers"]["throughput"]),
            csv_monitor=MonitorConfig(**top["csv_monitor"]),
            tensorboard=MonitorConfig(**top["tensorboard"]),
            activation_checkpointing=ActivationCheckpointing(**top["activation_checkpointing"]),
            communication=read_communication(top["communication"], world_size),
            gradient_compression=read_compression(top),
            dump_state=top["dump_state"],
            parallel=parallel,
            pipeline=pipeline,
            precision=_precision(top, parallel),
            zero=zero,
            aio=read_aio(top["aio"]),
            checkpoint_tag_validation=top["checkpoint"]["tag_validation"],
            checkpoint_load_universal=top["checkpoint"]["load_universal"],
            given=dict(values),
            notices=(),
        )
        # Combinations of keys are checked on the finished object, whose defaults are filled in. The checks add notices, so
        # these are set last.
        if config.accumulates_whole:
            config = dataclasses.replace(config, zero=whole_gradients(config.zero, notices))
        check(config)
        check_parallel(parallel, config.optimizer.type if config.optimizer else None)
        check_compression(config, notices)
        check_delay(config)
        note_contradictions(config, notices)
        return dataclasses.replace(config, notices=tuple(notices))

    @property
    def param_dtype(self) -> str | None:
        """``data_types.param_dtype`` as written; the blocks fp16 and bf16 decide."""
        return self.precision.param_dtype

    @property
    def buffer_dtype(self) -> str | None:
        """``data_types.buffer_dtype``: the dtype that floating-point buffers are cast to; None does not cast."""
        return self.precision.buffer_dtype

    @property
    def accumulates_whole(self) -> bool:
        """Whether a bf16 model's gradients are accumulated in fp32 without being sharded.

        That is stage 1 with grad_accum_dtype fp32 and no optimizer in host memory. DeepSpeed has another optimizer for it,
        which sends one message for all gradients.
        """
        stage = self.zero.stage
        wide = self.precision.bf16 and self.precision.grad_accum_dtype == "fp32"
        offload = self.zero.offload_optimizer
        if offload is not None and offload.device == "cpu":
            return False
        return wide and stage.shards_optimizer and not stage.shards_gradients

    def scaling(self, world_size: int) -> Scaling:
        """When gradients are divided, for the configured reduction (DeepSpeed 0.19.8's orders of division).

        The reductions to owners divide the bucket before any cast. Without contiguous gradients, auto divides between the
        cast and the sum. A plain all_reduce multiplies after the sum, or as prescale and predivide configure. Stage 3
        always divides between the cast and the sum.
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
        """The values in use, under the keys of a configuration; for the record of a run."""
        values = dataclasses.asdict(self)
        # The fields are named for the code; a configuration has some of them in blocks, or under other names.
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
            zero["sharding"],
        )
        zero["zero_quantized_weights"] = zero.pop("quantized_weights")
        zero["zero_quantized_gradients"] = zero.pop("quantized_gradients")
        # Keys of stage 3 are shown only where they act; at other stages offload uses one of them.
        if self.zero.stage.shards_parameters:
            zero.update(self.zero.sharding.effective())
        elif self.zero.offload_optimizer is not None:
            zero["sub_group_size"] = self.zero.sharding.sub_group_size
        types = self.zero.partitioned_types
        del zero["partitioned_types"]
        zero["zero_allowed_param_types"] = None if types.allowed is None else list(types.allowed)
        zero["zero_force_param_types"] = list(types.whole)
        zero["stage"] = self.zero.stage.number
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
            "tensor_parallel": {
                name: parallel[name] for name in ("plan", "partition_config", "sequence_parallel")
            },
            "aio": effective_aio(self.aio),
        }


def load(config: Any, args: Any = None) -> dict[str, Any]:
    """The configuration as a dictionary.

    Args:
        config: a mapping, the path of a JSON file, or its content in URL-safe base64, as launchers pass it.
        args: used if ``config`` is None: an object whose ``deepspeed_config`` is one of those.

    Raises:
        ConfigError: no configuration, two of them, or one that cannot be read.
    """
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and from_args is not None and config != from_args:
        raise ConfigError(
            f"two configurations: config={_shown(config)} and args.deepspeed_config={_shown(from_args)}; give one"
        )
    chosen = config if config is not None else from_args
    if chosen is None:
        raise ConfigError("no configuration; pass config= (a path or a dict) or args.deepspeed_config")
    if isinstance(chosen, Mapping):
        return dict(chosen)
    if isinstance(chosen, str):
        encoded = document.decoded(chosen)
        if encoded is not None:
            return encoded
    if isinstance(chosen, str | os.PathLike):
        return document.load(os.fspath(chosen))
    raise ConfigError(f"config is a {type(chosen).__name__}; expected a dict, or the path of a JSON file")


def parallel_of(values: Mapping[str, Any]) -> ParallelConfig:
    """The axes in ``values``, whose keys are all checked. Raises as ``RuntimeConfig.from_mapping`` does."""
    return read_parallel(keys.read(_modern(values, [])))


def pipeline_of(values: Mapping[str, Any]) -> PipelineConfig:
    """The pipeline in ``values``, whose keys are all checked. Raises as ``RuntimeConfig.from_mapping`` does."""
    return read_pipeline(keys.read(_modern(values, [])))


def _shown(config: Any) -> str:
    return "a dict" if isinstance(config, Mapping) else repr(str(config))


def _shared_batch_sizes(
    top: Mapping[str, Any], parallel: ParallelConfig, replicas: int, notices: list[str]
) -> tuple[int, int, int]:
    """:func:`batch_sizes` with tensor parallelism: with autotp_size, DeepSpeed counts a sample once for each rank."""
    batch, micro, steps = (
        top["train_batch_size"],
        top["train_micro_batch_size_per_gpu"],
        top["gradient_accumulation_steps"],
    )
    if not parallel.counts_slices or (micro is not None and batch == micro * (steps or 1) * replicas):
        return batch_sizes(top, replicas)
    micro, steps, counted = batch_sizes(top, replicas * parallel.tp_size)
    if batch is not None:
        notices.append(
            f"train_batch_size {counted} counts each sample once for each of the {parallel.tp_size} ranks of "
            f"tensor_parallel.autotp_size, as DeepSpeed does; a step has {micro * steps * replicas} samples"
        )
    return micro, steps, micro * steps * replicas


def batch_sizes(top: Mapping[str, Any], world_size: int) -> tuple[int, int, int]:
    """(micro-batch per rank, accumulation steps, batch); derives missing sizes.

    Raises:
        ConfigError: they do not multiply, or too few of them are set.
    """
    batch, micro, steps = (
        top["train_batch_size"],
        top["train_micro_batch_size_per_gpu"],
        top["gradient_accumulation_steps"],
    )
    if batch is None and micro is None:
        raise ConfigError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given; at least one is needed"
        )
    if batch is None:
        steps = steps or 1
        return micro, steps, micro * steps * world_size
    configured = micro, steps
    if micro is None:
        steps = steps or 1
        micro = batch // (world_size * steps)
    elif steps is None:
        steps = batch // (world_size * micro)
    if micro * steps * world_size != batch:
        derived = "" if None not in configured else " (what was left out is derived by whole division)"
        raise ConfigError(
            f"batch sizes do not multiply: train_batch_size {batch} != train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x world size {world_size} = {micro * steps * world_size}{derived}; "
            "change one of them, or leave one out"
        )
    return micro, steps, batch


def _precision(top: Mapping[str, Any], parallel: ParallelConfig) -> PrecisionConfig:
    """The dtypes. Sequence-parallel ranks have a communication dtype of their own, as in DeepSpeed."""
    precision = read_precision(top)
    if parallel.sequence_parallel_size == 1:
        return precision
    return dataclasses.replace(precision, communication_data_type=top["seq_parallel_communication_data_type"])


def _optimizer(block: Mapping[str, Any] | None) -> OptimizerConfig | None:
    if block is None:
        return None
    if block["type"] is None:
        raise ConfigError("optimizer.type is missing; expected Adam, AdamW, SGD or another torch.optim class")
    return OptimizerConfig(type=block["type"], params=block["params"])


def _scheduler(block: Mapping[str, Any] | None, written: Mapping[str, Any] | None) -> SchedulerConfig | None:
    if block is None:
        return None
    if block["type"] is None and "type" not in (written or {}):
        raise ConfigError("scheduler.type is missing; expected WarmupLR or a torch.optim.lr_scheduler class")
    if block["type"] is None:
        return None
    return SchedulerConfig(type=block["type"], params=block["params"])


def _modern(values: Mapping[str, Any], notices: list[str]) -> Mapping[str, Any]:
    """``values`` with old forms replaced: a bool for zero_optimization, and bfloat16."""
    values = keys.as_deepspeed_reads(values, notices)
    old = values.get("zero_optimization")
    if isinstance(old, bool):
        values["zero_optimization"] = {"stage": int(old)}
        notices.append(
            f'zero_optimization {str(old).lower()} is an old form, read as {{"stage": {int(old)}}}'
        )
    if "zero_optimization" in values:
        values["zero_optimization"] = modern_zero(values["zero_optimization"], notices)
    if "bfloat16" in values:
        if values.get("bf16"):
            raise ConfigError("both bf16 and its old name bfloat16 are given; keep bf16")
        values["bf16"] = values.pop("bfloat16")
    return values
