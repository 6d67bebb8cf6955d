"""The configuration: DeepSpeed's JSON, checked and typed, with all defaults.

``load`` reads a path, a mapping or ``args.deepspeed_config``. ``RuntimeConfig.from_mapping`` has no side effects.
:mod:`zero_runtime.configuration.all_keys` lists all keys and how this version treats them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from zero_runtime.configuration import all_keys
from zero_runtime.configuration.blocks.activation_block import ActivationCheckpointing
from zero_runtime.configuration.blocks.communication_block import read_communication
from zero_runtime.configuration.blocks.compression_block import read_compression
from zero_runtime.configuration.blocks.offload_block import read_aio
from zero_runtime.configuration.blocks.offload_param_block import modern as modern_zero
from zero_runtime.configuration.blocks.parallel_block import ParallelConfig, check_parallel, read_parallel
from zero_runtime.configuration.blocks.pipeline_block import PipelineConfig, accumulation_steps, read_pipeline
from zero_runtime.configuration.blocks.precision_block import PrecisionConfig, read_precision
from zero_runtime.configuration.blocks.sharding_block import note_two_names
from zero_runtime.configuration.blocks.zero_block import read_zero
from zero_runtime.configuration.config_values import (
    CommsLoggerConfig,
    ConfigValues,
    MonitorConfig,
    OptimizerConfig,
    SchedulerConfig,
    ThroughputConfig,
)
from zero_runtime.configuration.feature_combinations import check_compression, check_delay
from zero_runtime.configuration.reading import document
from zero_runtime.configuration.setting_combinations import check, note_contradictions, whole_gradients
from zero_runtime.errors import ConfigError


class RuntimeConfig(ConfigValues):
    """The whole configuration for one world size, read from DeepSpeed's keys."""

    __slots__ = ()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], world_size: int, stages: int = 1) -> RuntimeConfig:
        """Check ``values`` and fill in the defaults.

        Args:
            values: The configuration, by key.
            world_size: The number of ranks that train.
            stages: The number of pipeline stages. The number of replicas depends on it and on the other axes in
                ``values``.

        Raises:
            ConfigError: A key or value is wrong.
            UnsupportedError: A key or value exists in DeepSpeed but not in this version.
        """
        notices: list[str] = []
        # Old forms are replaced first, because the code below uses only the current names. Then a notice tells the user
        # about each key that is accepted without an effect.
        values = _modern(values, notices)
        top = all_keys.read(values)
        notices += [f"{name} has no effect here: {note}" for name, note in all_keys.inert_keys(values)]
        note_two_names(values.get("zero_optimization", {}), notices)
        zero = read_zero(top["zero_optimization"], top["disable_allgather"])
        if not zero.stage.shards_parameters:
            idle = all_keys.stage_3_only(values)
            notices += [f"{name} has no effect here: it acts at stage 3 only" for name in idle]
        # The axes are read before the batch sizes, because the batch sizes depend on the number of replicas.
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
            traffic_contract=top["traffic_contract"],
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
        # Combinations of keys are checked on the finished object, because it has all defaults. The notices are set
        # last, because the checks add notices.
        if config.accumulates_whole:
            config = dataclasses.replace(config, zero=whole_gradients(config.zero, notices))
        check(config)
        check_parallel(parallel, config.optimizer.type if config.optimizer else None)
        check_compression(config, notices)
        check_delay(config)
        note_contradictions(config, notices)
        return dataclasses.replace(config, notices=tuple(notices))


def load(config: Any, args: Any = None) -> dict[str, Any]:
    """Return the configuration as a dictionary.

    Args:
        config: A mapping, the path of a JSON file, or the content of a JSON file in URL-safe base64, as
            launchers pass it.
        args: An object with the attribute ``deepspeed_config``, whose value has one of these forms. It is used if
            ``config`` is None.

    Raises:
        ConfigError: There is no configuration, there are two different ones, or the configuration cannot be read.
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
    """Return the parallel axes in ``values``, after a check of all keys.

    Raises the same errors as ``RuntimeConfig.from_mapping``.
    """
    return read_parallel(all_keys.read(_modern(values, [])))


def pipeline_of(values: Mapping[str, Any]) -> PipelineConfig:
    """Return the pipeline settings in ``values``, after a check of all keys.

    Raises the same errors as ``RuntimeConfig.from_mapping``.
    """
    return read_pipeline(all_keys.read(_modern(values, [])))


def _shown(config: Any) -> str:
    return "a dict" if isinstance(config, Mapping) else repr(str(config))


def _shared_batch_sizes(
    top: Mapping[str, Any], parallel: ParallelConfig, replicas: int, notices: list[str]
) -> tuple[int, int, int]:
    """Return the result of :func:`batch_sizes`, adjusted for tensor parallelism.

    With autotp_size, DeepSpeed counts a sample once for each tensor-parallel rank.
    """
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
    """Return (micro-batch size per rank, accumulation steps, batch size), and derive the sizes that are missing.

    Raises:
        ConfigError: The product of the sizes is not the batch size, or too few sizes are set.
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
    """Return the dtypes.

    As in DeepSpeed, sequence-parallel ranks have a separate communication dtype.
    """
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
    """Return ``values`` with two old forms replaced: a bool for zero_optimization, and the key bfloat16."""
    values = all_keys.as_deepspeed_reads(values, notices)
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
