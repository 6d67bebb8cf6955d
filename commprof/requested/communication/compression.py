"""The messages that zero_runtime compresses or quantizes: the keys of the config, and the bytes.

The keys are zero_runtime's own. Every rank gathers the payloads of all. The payload of a bucket of n elements is

* ``topk``: ceil(ratio n) elements of the communication type, and as many places of 4 bytes (8 from 2^31 elements on),
* ``1bit``: n bits, and an fp32 number for each 2,048 elements,
* ``2bit``: 2 n bits, and two fp32 numbers for each 2,048 elements.

Huffman coded payloads are padded to the longest of any rank; their lengths (8 bytes each) are gathered before.
Quantized parameters and gradients (stage 3) take 8 and 4 bits for each element, and an fp32 number for each 256 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, Final, NamedTuple

from commprof.requested.config_keys import choice, count, flag, number, section, wrong
from commprof.requested.errors import UnsupportedError

ALGORITHMS: Final = ("topk", "1bit", "2bit", "none")
BLOCK: Final = 2048  # elements
_LEVEL_BYTES: Final = 4
_WIDE_PLACES: Final = 2**31  # elements
LENGTH_BYTES: Final = 8  # of a coded payload
WEIGHT_BITS: Final = 8
GRADIENT_BITS: Final = 4
_QUANTISED_BLOCK: Final = 256  # elements


def quantised_bytes(numel: int, bits: int) -> int:
    """Bytes of ``numel`` elements quantized to ``bits`` bits, with scales."""
    return -(-numel * bits // 8) + _LEVEL_BYTES * -(-numel // _QUANTISED_BLOCK)


def sign_bytes(numel: int, bits: int = 1) -> int:
    """Bytes of the signs of ``numel`` elements, with a level for each block; with 2 bits two levels."""
    return -(-numel * bits // 8) + bits * _LEVEL_BYTES * -(-numel // BLOCK)


class Compression(NamedTuple):
    """How gradients are compressed.

    Attributes:
        algorithm: one of :data:`ALGORITHMS`, not ``none``.
        ratio: share of the elements that ``topk`` sends, after its own warm-up.
        warmup_steps: steps at the start of the training that are not compressed.
        error_feedback: whether each rank adds what it did not send to the next gradient.
        coded: payloads are Huffman coded, so that their sizes depend on the values.
        hierarchical: only what hosts send to each other is compressed.
        two_phase: whether more than two ranks sum in two phases.
        host_ranks: ranks of each host, which only the launcher knows; 0 where it is not known.
        ratio_steps: compressed steps in which the share that ``topk`` sends falls exponentially to ``ratio``.
        first_ratio: the share in the first of these steps.
        clips_before: each rank clips its own gradients, and nobody clips their sum.
        corrects_momentum: each rank stores the momentum of its own gradients.
    """

    algorithm: str
    ratio: float
    warmup_steps: int
    error_feedback: bool
    coded: bool
    hierarchical: bool
    two_phase: bool = False
    host_ranks: int = 0
    ratio_steps: int = 0
    first_ratio: float = 0.25
    clips_before: bool = False
    corrects_momentum: bool = False

    @property
    def steady_step(self) -> int:
        """The first step that sends what all later ones do."""
        return self.warmup_steps + self.ratio_steps

    def in_step(self, step: int) -> Compression:
        """How gradients are compressed in step ``step``, after ``warmup_steps``: with the ratio of that step."""
        done = step - self.warmup_steps
        if done >= self.ratio_steps:
            return self
        ratio = self.first_ratio * (self.ratio / self.first_ratio) ** (done / self.ratio_steps)
        return self._replace(ratio=ratio)

    def payload_bytes(self, numel: int, item_bytes: int) -> int:
        """Bytes of ``numel`` compressed elements of one rank, each of ``item_bytes`` uncompressed."""
        if self.algorithm == "topk":
            places = 4 if numel < _WIDE_PLACES else 8
            return min(numel, max(1, ceil(self.ratio * numel))) * (item_bytes + places)
        return sign_bytes(numel, 1 if self.algorithm == "1bit" else 2)

    def refuse_unknown_hosts(self, world_size: int) -> None:
        """Raise UnsupportedError where it is not known how many ranks each host has, and that decides what is sent."""
        if self.hierarchical and (not self.host_ranks or world_size % self.host_ranks):
            raise UnsupportedError(
                "gradient_compression.hierarchical_compress",
                True,
                "what is compressed depends on how many ranks each host has",
            )


def read_compression(config: Mapping[str, Any]) -> Compression | None:
    """How ``config`` compresses gradients; None where it does not.

    Raises:
        RequestedError: a key has a value of the wrong type or outside its range.
    """
    switch = flag(config, "compress_communication", False, is_checked=False)
    if config.get("gradient_compression") is None and not switch:
        return None
    block = section(config, "gradient_compression")
    lower = {**block, "algorithm": str(block.get("algorithm", ALGORITHMS[0])).lower()}
    algorithm = choice(lower, "gradient_compression.algorithm", ALGORITHMS)
    if algorithm == "none" or not flag(block, "gradient_compression.enabled", True):
        return None
    ratio = number(block, "gradient_compression.topk_ratio", 0.01)
    if not 0 < ratio <= 1:
        raise wrong("gradient_compression.topk_ratio", ratio, "a number above 0 and up to 1")
    is_topk = algorithm == "topk"
    first_ratio = number(block, "gradient_compression.topk_warmup_ratio", 0.25)
    ratio_steps = count(block, "gradient_compression.topk_warmup_steps", 0, least=0) or 0
    if not 0 < first_ratio <= 1:
        raise wrong("gradient_compression.topk_warmup_ratio", first_ratio, "a number above 0 and up to 1")
    between_hosts = flag(
        section(config, "zero_optimization"), "zero_optimization.hierarchical_compress", False
    )
    return Compression(
        algorithm,
        ratio,
        count(block, "gradient_compression.warmup_steps", 0, least=0) or 0,
        flag(block, "gradient_compression.error_feedback", True),
        algorithm != "1bit" and flag(block, "gradient_compression.huffman_coding", False),
        between_hosts or flag(block, "gradient_compression.hierarchical_compress", False),
        flag(block, "gradient_compression.two_phase", False),
        ratio_steps=ratio_steps if is_topk else 0,
        first_ratio=first_ratio,
        clips_before=flag(block, "gradient_compression.clip_before_residual", False),
        corrects_momentum=flag(block, "gradient_compression.momentum_correction", False),
    )
