"""The configuration block ``gradient_compression``: its keys, and the settings that it conflicts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from zero_runtime.configuration.reading.checks import boolean, choice_of_any_case, fraction, integer
from zero_runtime.configuration.reading.key_table import Table, used
from zero_runtime.errors import ConfigError

if TYPE_CHECKING:
    from zero_runtime.config import RuntimeConfig

TOP_K: Final = "topk"
ONE_BIT: Final = "1bit"
TWO_BIT: Final = "2bit"
NONE: Final = "none"

COMPRESSION: Final[Table] = {
    "enabled": used(boolean, True, "false is another way to say algorithm none"),
    "algorithm": used(
        choice_of_any_case(TOP_K, ONE_BIT, TWO_BIT, NONE),
        TOP_K,
        "which part of a gradient is sent: its largest elements, signs, signs and one of two magnitudes, or all",
    ),
    "topk_ratio": used(fraction, 0.01, "share of the elements that topk sends"),
    "error_feedback": used(boolean, True, "add to the next gradients what was not sent of the last ones"),
    "warmup_steps": used(integer(0), 0, "steps at the start of the training that are not compressed"),
    "huffman_coding": used(
        boolean, False, "code the payloads of topk and 2bit, where that makes them smaller"
    ),
    "hierarchical_compress": used(boolean, False, "compress only what hosts send to each other"),
    "two_phase": used(
        boolean,
        False,
        "1bit and 2bit among more than two ranks: compress the sums too, so that a rank sends no more with more ranks",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCompression:
    """How gradients are compressed; see :data:`COMPRESSION`."""

    algorithm: str
    topk_ratio: float
    error_feedback: bool
    warmup_steps: int
    huffman_coding: bool
    hierarchical_compress: bool
    two_phase: bool


def read_compression(top: Mapping[str, Any]) -> GradientCompression | None:
    """The compression settings from the checked values of the complete configuration; None without compression.

    Raises:
        ConfigError: two keys contradict each other.
    """
    block, switch = top["gradient_compression"], top["compress_communication"]
    between_hosts = top["zero_optimization"]["hierarchical_compress"]
    is_off = block is not None and (block["algorithm"] == NONE or not block["enabled"])
    if switch and is_off:
        raise ConfigError(
            "compress_communication is true, and gradient_compression says algorithm none or enabled false; remove one of "
            "the two"
        )
    if is_off or (block is None and not switch):
        if between_hosts:
            raise ConfigError(
                "zero_optimization.hierarchical_compress is true, and gradients are not compressed; add "
                "gradient_compression or compress_communication, or remove the key"
            )
        return None
    values = {name: key.default for name, key in COMPRESSION.items()} if block is None else dict(block)
    values["hierarchical_compress"] = values["hierarchical_compress"] or between_hosts
    del values["enabled"]
    return GradientCompression(**values)


def check_compression(config: RuntimeConfig, notices: list[str]) -> None:
    """Refuse settings that conflict with gradient compression, and add notices for settings without effect.

    Raises:
        ConfigError: there is a conflict.
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
    block = config.given.get("gradient_compression") or {}
    if compression.algorithm != TOP_K and "topk_ratio" in block:
        notices.append(
            f"gradient_compression.topk_ratio has no effect with algorithm {compression.algorithm}"
        )
    if compression.algorithm == ONE_BIT and compression.huffman_coding:
        notices.append(
            "gradient_compression.huffman_coding has no effect with algorithm 1bit, whose signs do not get smaller"
        )


def check_one_bit(config: RuntimeConfig, kind: str) -> None:
    """Refuse settings that conflict with a 1-bit optimizer, called ``kind``.

    Raises:
        ConfigError: there is a conflict.
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
    ):
        if conflict:
            raise ConfigError(
                f"optimizer.type {kind} sends compressed means of its own, and does not go together with {conflict}; use "
                f"{instead}, or AdamW with gradient_compression"
            )
