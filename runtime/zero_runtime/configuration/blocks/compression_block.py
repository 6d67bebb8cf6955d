"""The configuration block ``gradient_compression``: its keys, and the settings that it conflicts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zero_runtime.configuration.reading.checks import boolean, choice_of_any_case, fraction, integer
from zero_runtime.configuration.reading.key_table import Table, used
from zero_runtime.errors import ConfigError

TOP_K: Final = "topk"
ONE_BIT: Final = "1bit"
TWO_BIT: Final = "2bit"
NONE: Final = "none"

COMPRESSION: Final[Table] = {
    "enabled": used(boolean, True, "enable compression. The value false is the same as algorithm none"),
    "algorithm": used(
        choice_of_any_case(TOP_K, ONE_BIT, TWO_BIT, NONE),
        TOP_K,
        "which part of a gradient is sent: the largest elements (`topk`), the signs (`1bit`), the signs "
        "with one of two magnitudes (`2bit`), or everything (`none`). In the measurements in "
        "docs/compression.md, these combinations raised the loss by more than 1 %. With AdamW: 1bit, 2bit, "
        "and topk if betas[0] is above 0. With the momentum of SGD: 1bit in all cases, 2bit and topk "
        "without momentum_correction, and topk with topk_ratio 0.01",
    ),
    "topk_ratio": used(fraction, 0.01, "the share of the elements that topk sends"),
    "error_feedback": used(
        boolean, True, "keep the part of the gradients that was not sent, and add it to the next gradients"
    ),
    "warmup_steps": used(
        integer(0), 0, "the number of steps without compression at the start of the training"
    ),
    "topk_warmup_steps": used(
        integer(0),
        0,
        "the number of compressed steps in which the share that topk sends falls exponentially to topk_ratio",
    ),
    "topk_warmup_ratio": used(
        fraction, 0.25, "the share that topk sends in the first of the topk_warmup_steps"
    ),
    "momentum_correction": used(
        boolean,
        False,
        "with SGD, each rank applies the momentum to its own gradients before it compresses them",
    ),
    "clip_before_residual": used(
        boolean,
        False,
        "each rank clips its own gradients to gradient_clipping / sqrt(ranks). The sum is then not clipped",
    ),
    "residual_decay": used(
        fraction, 1.0, "the factor that multiplies the residual before the residual is added to a gradient"
    ),
    "huffman_coding": used(
        boolean, False, "apply Huffman coding to a payload of topk or 2bit if the payload becomes smaller"
    ),
    "hierarchical_compress": used(boolean, False, "compress only the traffic between hosts"),
    "two_phase": used(
        boolean,
        False,
        "with 1bit and 2bit on more than two ranks, compress the sums too. The bytes per rank then do not "
        "grow with the number of ranks",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCompression:
    """The settings of gradient compression. :data:`COMPRESSION` describes the fields."""

    algorithm: str
    topk_ratio: float
    error_feedback: bool
    warmup_steps: int
    topk_warmup_steps: int
    topk_warmup_ratio: float
    momentum_correction: bool
    clip_before_residual: bool
    residual_decay: float
    huffman_coding: bool
    hierarchical_compress: bool
    two_phase: bool

    def topk_ratio_of(self, step: int) -> float:
        """Return the share of the elements that topk sends in step number ``step`` of the training."""
        compressed = step - self.warmup_steps
        if compressed >= self.topk_warmup_steps:
            return self.topk_ratio
        fall = self.topk_ratio / self.topk_warmup_ratio
        return float(self.topk_warmup_ratio * fall ** (compressed / self.topk_warmup_steps))


def read_compression(top: Mapping[str, Any]) -> GradientCompression | None:
    """Return the compression settings in the checked values of the complete configuration; None without compression.

    Raises:
        ConfigError: Two keys contradict each other.
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
