"""Refuses the features of a config that the rules of this package do not cover."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commprof.requested.communication.sign_optimizers import NAMES as COMPRESSING_OPTIMIZERS
from commprof.requested.communication.sign_optimizers import refuse_unknown
from commprof.requested.config_keys import count, flag, section, set_keys
from commprof.requested.configuration import Configuration, autocast_dtype, read_configuration
from commprof.requested.errors import UnsupportedError


def refuse_unsupported(
    config: Mapping[str, Any], stage: int, world_size: int, *, is_own: bool = False
) -> None:
    """Raise UnsupportedError, which names the key, if ``config`` uses a feature that the rules do not cover.

    ``is_own`` means that the runtime is zero_runtime. Its rules for quantization, compression and composed collectives
    are known.
    """
    zero = set_keys(config.get("zero_optimization"))
    if stage and zero.get("zenflow"):
        raise UnsupportedError(
            "zero_optimization.zenflow", zero["zenflow"], "ZenFlow selects gradients by value"
        )
    if stage and autocast_dtype(config) is not None:
        raise UnsupportedError(
            "torch_autocast.enabled",
            True,
            "the element type of a gradient then depends on the class of its module",
        )
    if flag(set_keys(config.get("compile")), "compile.deepcompile", False):
        raise UnsupportedError("compile.deepcompile", True, "DeepCompile replaces the gradient reduction")
    for block, key in (
        (config, "fp16_override_modules"),
        (set_keys(config.get("fp16")), "fp16.fp16_override_modules"),
    ):
        modules = block.get("fp16_override_modules")
        if modules:
            raise UnsupportedError(key, modules, "the element types of the model are then mixed")
    if config.get("sparse_gradients") is True:
        raise UnsupportedError(
            "sparse_gradients", True, "the size of a sparse gradient depends on the tokens of the batch"
        )
    if optimizer_type(config) in COMPRESSING_OPTIMIZERS:
        if not is_own:
            kind = config["optimizer"]["type"]
            raise UnsupportedError(
                "optimizer.type", kind, "it sends compressed momentum instead of gradients"
            )
        refuse_unknown(config, stage)
    if flag(set_keys(config.get("expert_parallel")), "expert_parallel.enabled", False):
        raise UnsupportedError(
            "expert_parallel.enabled",
            True,
            "the ranks then form more groups than data parallelism has",
        )
    delay = _delay(config)
    if stage and delay:
        raise UnsupportedError("communication.bounded_delay", delay, "it works at stage 0 only")
    if stage == 3:
        _refuse_with_stage_3(config, zero, world_size, is_own)
    if is_own and stage == 0:
        _refuse_with_whole_buckets(config)
    _refuse_parallel(config)


def _refuse_with_whole_buckets(config: Mapping[str, Any]) -> None:
    configuration = read_configuration(config)
    if not configuration.reduces_whole_in_buckets:
        return
    kind = optimizer_type(config)
    for key, value in (
        ("gradient_compression", configuration.compression and config["gradient_compression"]),
        ("communication.bounded_delay", _delay(config)),
        ("optimizer.type", kind if kind in COMPRESSING_OPTIMIZERS else None),
        ("managed_gradient_accumulation", None if configuration.managed_accumulation else "false"),
    ):
        if value:
            raise UnsupportedError(
                key,
                value,
                "zero_runtime refuses it beside gradient_reduction all_reduce and overlap_comm true at stage 0",
            )


def _refuse_with_stage_3(
    config: Mapping[str, Any], zero: Mapping[str, Any], world_size: int, is_own: bool
) -> None:
    quantised = "values are then quantized, with scales whose sizes the sources do not state"
    for name in (
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
    ):
        if not is_own and flag(zero, f"zero_optimization.{name}", False):
            raise UnsupportedError(f"zero_optimization.{name}", zero[name], quantised)
    secondary = count(zero, "zero_optimization.zero_hpz_partition_size", 1, least=0) or 1
    if secondary > 1 and world_size % secondary:
        reason = f"the runtime refuses it, because it does not divide the {world_size} ranks"
        raise UnsupportedError("zero_optimization.zero_hpz_partition_size", secondary, reason)
    for prefix in ("stage3_", ""):
        key = f"zero_optimization.{prefix}module_granularity_threshold"
        granularity = count(zero, key, 0, least=-(2**63)) or 0
        if granularity > 0:
            reason = "which modules are then gathered as one depends on the code of the model"
            raise UnsupportedError(key, granularity, reason)
    if optimizer_type(config) == "muon":
        raise UnsupportedError("optimizer.type", "Muon", "Muon gathers matrices within the step")
    if (count(zero, "zero_optimization.mics_shard_size", 0, least=-(2**63)) or 0) > 0:
        raise UnsupportedError(
            "zero_optimization.mics_shard_size",
            zero["mics_shard_size"],
            "parameters are then partitioned within groups of ranks",
        )


def optimizer_type(config: Mapping[str, Any]) -> str:
    """Return ``optimizer.type`` of the config in lower case, or ``none`` without an optimizer."""
    return str(set_keys(config.get("optimizer")).get("type")).lower()


def refuse_with_experts(config: Mapping[str, Any], configuration: Configuration, *, is_own: bool) -> None:
    """Raise UnsupportedError, which names the key, if ``config`` cannot be used for a model with experts.

    DeepSpeed refuses stage 3, gradients that are not reduced to their owners, and buckets at stage 2 that are not
    contiguous. Source: DeepSpeed 0.19.8, ``_validate_zero3_moe_compatibility``, ``_configure_moe_settings``.

    ``is_own`` means that the runtime is zero_runtime. DeepSpeed ignores the keys that only zero_runtime has.
    """
    if configuration.stage == 3:
        raise UnsupportedError(
            "zero_optimization.stage",
            3,
            "the model has experts, and DeepSpeed trains these at stages 0 to 2 only",
        )
    if configuration.partitions and not configuration.reduces_flat_groups:
        reason = "the model has experts, whose gradients are reduced in groups of their own"
        if not configuration.reduce_scatter:
            raise UnsupportedError("zero_optimization.reduce_scatter", False, reason)
        if configuration.stage == 2 and not configuration.buffers_are_contiguous:
            raise UnsupportedError("zero_optimization.contiguous_gradients", False, reason)
        if configuration.gradient_reduction == "all_reduce":
            raise UnsupportedError("zero_optimization.gradient_reduction", "all_reduce", reason)
    if not is_own:
        return
    zero, communication = (set_keys(config.get(name)) for name in ("zero_optimization", "communication"))
    topology = communication.get("topology")
    reason = "with experts there are several groups that reduce gradients"
    for key, value in (
        ("gradient_compression", configuration.compression),
        ("zero_optimization.zero_quantized_gradients", configuration.quantises_gradients),
        ("zero_optimization.zero_quantized_weights", configuration.quantises_weights),
        ("communication.topology", topology if topology != 1 else None),  # 1 is the plain collective
        ("communication.bounded_delay", _delay(config)),
        ("zero_optimization.overlap_comm", configuration.reduces_whole_in_buckets),
        ("zero_optimization.zero_force_param_types", zero.get("zero_force_param_types")),
        ("zero_optimization.zero_allowed_param_types", zero.get("zero_allowed_param_types")),
    ):
        if value:
            raise UnsupportedError(key, config.get(key, value), reason)
    if optimizer_type(config) in COMPRESSING_OPTIMIZERS or (
        configuration.partitions and optimizer_type(config) == "lamb"
    ):
        raise UnsupportedError("optimizer.type", config["optimizer"]["type"], reason)


def _delay(config: Mapping[str, Any]) -> int:
    return count(section(config, "communication"), "communication.bounded_delay", 0, least=0) or 0


def _refuse_parallel(config: Mapping[str, Any]) -> None:
    tensor, pipeline = set_keys(config.get("tensor_parallel")), set_keys(config.get("pipeline_parallel"))
    has_stages = flag(pipeline, "pipeline_parallel.enabled", True)
    blocks: dict[str, Mapping[str, Any]] = {
        "sequence_parallel_size": config,
        "tp_size": config,
        "tensor_parallel.autotp_size": tensor,
        "tensor_parallel.tp.tp_size": set_keys(tensor.get("tp")),
        "pipeline.stages": set_keys(config.get("pipeline")),
        "pipeline_parallel.pp_size": pipeline if has_stages else {},
    }
    for key, block in blocks.items():
        size = count(block, key, 1, least=0) or 1
        if size > 1:
            raise UnsupportedError(key, size, "the ranks then form more groups than data parallelism has")
