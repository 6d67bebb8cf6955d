"""Checks that refuse combinations with gradient compression, 1-bit optimizers and bounded delay."""

from __future__ import annotations

from zero_runtime.configuration.blocks.compression_block import ONE_BIT, TOP_K, TWO_BIT, GradientCompression
from zero_runtime.configuration.config_values import ConfigValues
from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.loss_scale import UNSCALED
from zero_runtime.gradient_reduction.stages import BOUNDARY


def check_compression(config: ConfigValues, notices: list[str]) -> None:
    """Refuse settings that conflict with gradient compression, and add notices for settings without effect.

    Raises:
        ConfigError: There is a conflict.
    """
    compression, zero = config.gradient_compression, config.zero
    kind = "" if config.optimizer is None else config.optimizer.type
    if kind.lower() in ("onebitadam", "onebitlamb", "zerooneadam"):
        check_one_bit(config, kind)
    if compression is None:
        return
    if zero.stage.shards_parameters:
        raise ConfigError(
            f"gradient_compression (algorithm {compression.algorithm}) works at stages 0, 1 and 2, and the stage is 3, "
            "where residuals would need the complete model's memory on every rank; use "
            "zero_optimization.zero_quantized_gradients there, or another stage"
        )
    if zero.quantized_gradients:
        raise ConfigError(
            "gradient_compression and zero_optimization.zero_quantized_gradients each set how gradients are sent; "
            "remove one "
            "of the two"
        )
    if zero.gradient_reduction == "reduce_scatter":
        raise ConfigError(
            "gradient_compression has all ranks gather compressed gradients, and zero_optimization.gradient_reduction is "
            "reduce_scatter; remove one of the two keys"
        )
    if compression.two_phase and compression.algorithm not in (ONE_BIT, TWO_BIT):
        raise ConfigError(
            f"gradient_compression.two_phase compresses sums again, and the algorithm is {compression.algorithm}, which "
            "leaves most of a sum out; use 1bit or 2bit, or set two_phase to false"
        )
    if compression.two_phase and compression.huffman_coding and compression.algorithm == TWO_BIT:
        raise ConfigError(
            "gradient_compression.two_phase needs payloads of one length, and huffman_coding makes them differ; set one of "
            "the two to false"
        )
    _check_convergence_keys(config, compression)
    block = config.given.get("gradient_compression") or {}
    if compression.algorithm != TOP_K:
        notices.extend(
            f"gradient_compression.{key} has no effect with algorithm {compression.algorithm}"
            for key in ("topk_ratio", "topk_warmup_steps", "topk_warmup_ratio")
            if key in block
        )
    if compression.clip_before_residual and config.gradient_clipping == 0:
        notices.append("gradient_compression.clip_before_residual has no effect with gradient_clipping 0")
    if compression.residual_decay < 1 and not compression.error_feedback:
        notices.append("gradient_compression.residual_decay has no effect with error_feedback false")
    if compression.algorithm == ONE_BIT and compression.huffman_coding:
        notices.append(
            "gradient_compression.huffman_coding has no effect with algorithm 1bit, whose signs do not get smaller"
        )


def _check_convergence_keys(config: ConfigValues, compression: GradientCompression) -> None:
    """Refuse settings that conflict with the keys that improve the convergence of a compressed training."""
    if compression.topk_warmup_steps and compression.topk_warmup_ratio < compression.topk_ratio:
        raise ConfigError(
            f"gradient_compression.topk_warmup_ratio is {compression.topk_warmup_ratio:g}, below the topk_ratio of "
            f"{compression.topk_ratio:g} that follows it; expected a larger share, or topk_warmup_steps 0"
        )
    if compression.momentum_correction:
        for conflict, instead in (
            (not compression.error_feedback and "error_feedback false, which drops the momentum", "true"),
            (
                compression.hierarchical_compress
                and "hierarchical_compress, where ranks exchange other elements before warmup_steps than after",
                "one of the two",
            ),
        ):
            if conflict:
                raise ConfigError(
                    f"gradient_compression.momentum_correction does not go together with {conflict}; use {instead}"
                )
    accumulated = config.gradient_accumulation_steps
    sends_each = config.zero.stage.shards_gradients and config.zero.gradient_accumulation_reduce != BOUNDARY
    if compression.clip_before_residual and sends_each and accumulated > 1:
        raise ConfigError(
            "gradient_compression.clip_before_residual clips the gradients of a step, and stage 2 sends those of each of "
            f"{accumulated} micro-batches (gradient_accumulation_steps); use stage 0 or 1, or set "
            f"zero_optimization.gradient_accumulation_reduce to {BOUNDARY}, or clip_before_residual to false"
        )


def check_one_bit(config: ConfigValues, kind: str) -> None:
    """Refuse settings that conflict with a 1-bit optimizer, whose name is ``kind``.

    Raises:
        ConfigError: There is a conflict.
    """
    kinds = config.precision
    for conflict, instead in (
        (
            config.zero.stage.shards_optimizer and f"zero_optimization.stage {config.zero.stage.number}",
            "stage 0",
        ),
        (config.gradient_compression is not None and "gradient_compression", "one of the two"),
        (kinds.bf16_masters and "bf16.bf16_master_weights_and_grads", "masters in fp32"),
        (config.gradient_allreduce_op != "mean" and "gradient_allreduce_op sum", "mean"),
        (config.communication.bounded_delay and "communication.bounded_delay", "one of the two"),
        (
            config.zero.reduces_whole_in_buckets and "gradient_reduction all_reduce with overlap_comm true",
            "overlap_comm false",
        ),
    ):
        if conflict:
            raise ConfigError(
                f"optimizer.type {kind} sends compressed means of its own, and does not go together with {conflict}; use "
                f"{instead}, or AdamW with gradient_compression"
            )


def check_delay(config: ConfigValues) -> None:
    """Refuse settings that conflict with ``bounded_delay``.

    Raises:
        ConfigError: There is a conflict.
    """
    delay, kinds, stage = config.communication.bounded_delay, config.precision, config.zero.stage
    if not delay:
        return
    for conflict, instead in (
        (stage.shards_optimizer and f"zero_optimization.stage {stage.number}", "stage 0"),
        (
            kinds.loss_scale is not UNSCALED
            and "the loss scale of fp16, which may change until gradients are applied",
            "bf16 or fp32",
        ),
        (not config.communication.plain and "communication.topology", "topology 1"),
        (
            config.communication.slow_node_tolerance is not None
            and "communication.slow_node_tolerance, for which the ranks meet after every step",
            "one of the two",
        ),
        (config.gradient_compression is not None and "gradient_compression", "one of the two"),
    ):
        if conflict:
            raise ConfigError(
                f"communication.bounded_delay is {delay}, and does not go together with {conflict}; use {instead}, or "
                "remove "
                "bounded_delay"
            )
