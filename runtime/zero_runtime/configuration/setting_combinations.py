"""Checks of combinations of settings: combinations that are refused, and settings that override one another."""

from __future__ import annotations

import dataclasses
from typing import Final

from zero_runtime.configuration.blocks.zero_block import WHOLE_BUCKET_NUMEL, ZeroConfig, automatic_reduction
from zero_runtime.configuration.config_values import ConfigValues
from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.stages import EACH
from zero_runtime.sharding.gather_schedule.gathered_blocks import BLOCK


def whole_gradients(zero: ZeroConfig, notices: list[str]) -> ZeroConfig:
    """Return the configuration of a stage that sends all gradients in one all_reduce.

    This function adds a notice about the keys that have no effect as a result.

    Raises:
        ConfigError: ``gradient_reduction`` is set to another reduction.
    """
    if zero.explicit_reduction and zero.gradient_reduction != "all_reduce":
        raise ConfigError(
            f"zero_optimization.gradient_reduction is {zero.gradient_reduction}, but stage 1 with grad_accum_dtype fp32 "
            "sends all gradients in one all_reduce; use stage 2, or remove one of the two keys"
        )
    notices.append(
        "grad_accum_dtype fp32 at stage 1 sends all gradients in one all_reduce; reduce_scatter, "
        "use_multi_rank_bucket_allreduce and reduce_bucket_size have no effect"
    )
    return dataclasses.replace(
        zero, gradient_reduction="all_reduce", explicit_reduction=True, reduce_bucket_size=WHOLE_BUCKET_NUMEL
    )


def check(config: ConfigValues) -> None:
    """Refuse settings that contradict each other. Raises ConfigError."""
    zero = config.zero
    averaged = config.gradient_allreduce_op == "mean"
    to_owners = zero.gradient_reduction != "all_reduce" if zero.explicit_reduction else zero.reduce_scatter
    if zero.stage.shards_gradients and averaged and to_owners:
        for name, value, neutral in (
            ("gradient_predivide_factor", config.gradient_predivide_factor, 1.0),
            ("prescale_gradients", config.prescale_gradients, False),
        ):
            if value != neutral:
                raise ConfigError(
                    f"{name} is {value}, which stage {zero.stage.number} does not do when it reduces to owners; set "
                    "zero_optimization.reduce_scatter to false, or remove the key"
                )
    if zero.overlap_parameter_gather and not zero.allgather_partitions:
        raise ConfigError(
            "zero_optimization.overlap_parameter_gather needs parameters that are gathered, and allgather_partitions "
            "false (or disable_allgather) broadcasts each shard; remove one of the two keys"
        )
    _check_quantized(config)
    if zero.reduces_whole_in_buckets:
        for present, key in (
            (config.gradient_compression is not None, "gradient_compression"),
            (config.communication.bounded_delay > 0, "communication.bounded_delay"),
        ):
            if present:
                raise ConfigError(
                    "zero_optimization.gradient_reduction all_reduce with overlap_comm true sends the gradients of stage 0 "
                    f"in buckets during the backward pass, which does not go together with {key}; set overlap_comm to "
                    f"false, or remove {key}"
                )
    if zero.partitioned_types and config.gradient_compression is not None:
        raise ConfigError(
            "zero_optimization.zero_allowed_param_types and zero_force_param_types have some gradients summed whole on "
            "every rank, and gradient_compression sends all of them compressed; remove one of the two"
        )
    if config.gradient_predivide_factor == 0.0:
        raise ConfigError("gradient_predivide_factor is 0; expected a number other than 0, such as 1.0")
    if zero.stage.shards_parameters and not averaged:
        raise ConfigError(
            f"gradient_allreduce_op is {config.gradient_allreduce_op}, which is not supported with ZeRO stage 3; set it to "
            "mean, or use stage 1 or 2"
        )
    if not zero.compute_grad_norm and config.sum_clipping > 0 and zero.stage.shards_optimizer:
        raise ConfigError(
            "zero_optimization.compute_grad_norm is false, but clipping to gradient_clipping "
            f"{config.gradient_clipping:g} (1.0 when the key is absent) needs the norm; set gradient_clipping to 0"
        )
    if zero.stage.waits and not config.managed_gradient_accumulation:
        raise ConfigError(
            "zero_optimization.gradient_accumulation_reduce is boundary, and with managed_gradient_accumulation false the "
            "last micro-batch of a step is known after its backward pass only; remove one of the two keys"
        )
    if not config.managed_gradient_accumulation and zero.overlap_comm and not zero.stage.shards_gradients:
        raise ConfigError(
            "managed_gradient_accumulation false works with overlap_comm at stage 2 only, and the stage is "
            f"{zero.stage.number}; set overlap_comm to false"
        )


def _check_quantized(config: ConfigValues) -> None:
    """Refuse settings that conflict with quantized messages at stages 1 and 2."""
    zero = config.zero
    gradients, weights = (
        f"zero_optimization.zero_quantized_{name} is true at stage {zero.stage.number}"
        for name in ("gradients", "weights")
    )
    for wrong, why in (
        (
            zero.quantized_gradients and config.precision.autocast_dtype,
            f"{gradients}, and torch_autocast sends gradients in several dtypes",
        ),
        (
            zero.quantized_gradients and zero.partitioned_types,
            f"{gradients}, and zero_allowed_param_types or zero_force_param_types has some summed whole on every rank",
        ),
        (
            zero.quantized_weights and not zero.allgather_partitions,
            f"{weights}, and allgather_partitions false (or disable_allgather) broadcasts each shard without quantization",
        ),
        (
            zero.quantized_weights and zero.overlap_parameter_gather,
            f"{weights}, and overlap_parameter_gather lets the model use shards as they arrive",
        ),
    ):
        if wrong:
            raise ConfigError(f"{why}; remove one of the two, or use stage 3")


def note_contradictions(config: ConfigValues, notices: list[str]) -> None:
    """Add a line to ``notices`` for each setting that has no effect because of another setting or the stage."""
    zero, zero_block = config.zero, config.given.get("zero_optimization", {})
    if not zero.stage.shards_gradients and zero_block.get("gradient_accumulation_reduce", EACH) != EACH:
        notices.append(
            f"zero_optimization.gradient_accumulation_reduce has no effect at stage {zero.stage.number}, which always "
            "reduces once a step, in the last micro-batch"
        )
    if config.precision.fp32_modules and config.precision.model == "fp32":
        notices.append("fp16_override_modules has no effect here: the whole model trains in fp32")
    if not zero.stage.shards_optimizer:
        _note_stage_0(config, notices)
        return
    if zero.stage.shards_parameters:
        _note_stage_3(config, notices)
        return
    if zero.offload_optimizer is None and "sub_group_size" in zero_block:
        notices.append(
            "sub_group_size has no effect here: it acts at stage 3, and elsewhere with offload_optimizer"
        )
    if zero.offload_optimizer is not None and zero_block.get("contiguous_gradients") is False:
        notices.append(
            "contiguous_gradients false has no effect with offload_optimizer: gradients share a buffer"
        )
    # gradient_reduction overrides DeepSpeed's three keys. Among these, contiguous_gradients overrides the other two.
    names = ("reduce_scatter", "use_multi_rank_bucket_allreduce")
    if zero.explicit_reduction:
        automatic = automatic_reduction(
            zero.stage,
            {
                "contiguous_gradients": zero.contiguous_gradients,
                "reduce_scatter": zero.reduce_scatter,
                "use_multi_rank_bucket_allreduce": zero.use_multi_rank_bucket_allreduce,
            },
        )
        settings = [
            f"{name} {str(zero_block[name]).lower()}"
            for name in (*names, "contiguous_gradients")
            if name in zero_block
        ]
        if settings and not config.accumulates_whole and automatic != zero.gradient_reduction:
            notices.append(
                f"gradient_reduction {zero.gradient_reduction} is used; {', '.join(settings)} would mean {automatic}"
            )
    elif not zero.contiguous_gradients and any(name in zero_block for name in names):
        settings = [f"{name} {str(zero_block[name]).lower()}" for name in names if name in zero_block]
        notices.append(
            f"contiguous_gradients false overrides {' and '.join(settings)}: gradients are reduced by all_reduce; "
            "set gradient_reduction to choose"
        )
    prescaled = config.prescale_gradients or config.gradient_predivide_factor != 1.0
    if prescaled and zero.gradient_reduction != "all_reduce":
        notices.append(
            "prescale_gradients and gradient_predivide_factor have no effect here: reductions to owners "
            "divide by the world size before the sum"
        )


def _note_stage_0(config: ConfigValues, notices: list[str]) -> None:
    zero, zero_block = config.zero, config.given.get("zero_optimization", {})
    if zero.partitioned_types:
        notices.append(
            "zero_allowed_param_types and zero_force_param_types have no effect at stage 0, which partitions nothing"
        )
    device = (zero_block.get("offload_optimizer") or {}).get("device") or "none"
    if device != "none" or zero_block.get("cpu_offload"):
        notices.append(
            "offload_optimizer has no effect at stage 0, where every rank keeps the whole optimizer; use stage 1, 2 or 3"
        )
    notices += [
        f"zero_optimization.{name} has no effect at stage 0, which partitions nothing; use stage 1, 2 or 3"
        for name in ("zero_quantized_weights", "zero_quantized_gradients")
        if zero_block.get(name)
    ]


_INERT_AT_STAGE_3: Final = {
    "use_multi_rank_bucket_allreduce": True,
    "round_robin_gradients": False,
    "parameter_alignment": False,
    "allgather_partitions": True,
    "allgather_bucket_size": None,
    "overlap_parameter_gather": False,
    "compute_grad_norm": True,
}


def _note_stage_3(config: ConfigValues, notices: list[str]) -> None:
    zero, zero_block = config.zero, config.given.get("zero_optimization", {})
    idle = [
        name
        for name, neutral in _INERT_AT_STAGE_3.items()
        if zero_block.get(name, neutral) not in (neutral, None)
    ]
    if idle:
        notices.append(
            f"{', '.join(idle)}: no effect at stage 3, where each parameter is partitioned separately"
        )
    by_block = (
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "reduce_bucket_size",
    )
    if zero.sharding.residency.unit == BLOCK:
        idle = [name for name in by_block if name in zero_block or name.removeprefix("stage3_") in zero_block]
        if idle:
            notices.append(f"{', '.join(idle)}: no effect with stage3_gather_unit block")
    unheeded = zero.gradient_reduction == "reduce_scatter" and zero_block.get("reduce_scatter") is False
    if unheeded and not zero.explicit_reduction:
        notices.append(
            "reduce_scatter false has no effect at stage 3 without contiguous_gradients: gradients are reduced by "
            "reduce_scatter all the same; set gradient_reduction to all_reduce to choose"
        )
