"""The config keys and the sizes of messages that zero_runtime compresses or quantizes.

Only zero_runtime has the keys for compression. Every rank gathers the payloads of all ranks. The payload of a bucket
of n elements is

* ``topk``: ceil(ratio n) elements of the communication type, and as many indices of 4 bytes (8 bytes from 2^31 elements
  on),
* ``1bit``: n bits, and an fp32 number for each 2,048 elements,
* ``2bit``: 2 n bits, and two fp32 numbers for each 2,048 elements.

Huffman coded payloads are padded to the longest payload of any rank. The ranks gather their lengths (8 bytes each)
first. Quantized parameters and gradients have 8 and 4 bits per element, and an fp32 number for each 256 elements.
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
LENGTH_BYTES: Final = 8  # bytes of the length of a coded payload
WEIGHT_BITS: Final = 8
GRADIENT_BITS: Final = 4
_QUANTISED_BLOCK: Final = 256  # elements


def quantised_bytes(numel: int, bits: int) -> int:
    """Return the bytes of ``numel`` elements that are quantized to ``bits`` bits, including the scales."""
    return -(-numel * bits // 8) + _LEVEL_BYTES * -(-numel // _QUANTISED_BLOCK)


def sign_bytes(numel: int, bits: int = 1) -> int:
    """Return the bytes of ``numel`` elements in ``bits`` bits, including one fp32 level per block and bit."""
    return -(-numel * bits // 8) + bits * _LEVEL_BYTES * -(-numel // BLOCK)


class Compression(NamedTuple):
    """The settings of gradient compression.

    Attributes:
        algorithm: A value of :data:`ALGORITHMS` except ``none``.
        ratio: The share of the elements that ``topk`` sends after its own warm-up.
        warmup_steps: The number of steps at the start of the training whose gradients are not compressed.
        error_feedback: Whether each rank adds the residual of a gradient to the next gradient.
        coded: Whether payloads are Huffman coded, so that their sizes depend on the values.
        hierarchical: Whether only the messages between hosts are compressed.
        two_phase: Whether groups of more than two ranks sum in two phases.
        host_ranks: The number of ranks per host, or 0 if it is not known. The config does not contain this number.
        ratio_steps: The number of compressed steps in which the share of ``topk`` falls exponentially to ``ratio``.
        first_ratio: The share in the first of these steps.
        clips_before: Whether each rank clips its own gradients, and the sum is not clipped.
        corrects_momentum: Whether each rank stores the momentum of its own gradients.
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
        """The number of the first step that sends the same messages as all later steps."""
        return self.warmup_steps + self.ratio_steps

    def in_step(self, step: int) -> Compression:
        """Return the settings with the ratio of step ``step``, which must not be before the end of ``warmup_steps``."""
        done = step - self.warmup_steps
        if done >= self.ratio_steps:
            return self
        ratio = self.first_ratio * (self.ratio / self.first_ratio) ** (done / self.ratio_steps)
        return self._replace(ratio=ratio)

    def payload_bytes(self, numel: int, item_bytes: int) -> int:
        """Return the bytes of ``numel`` compressed elements of one rank.

        ``item_bytes`` is the size of an element before compression.
        """
        if self.algorithm == "topk":
            places = 4 if numel < _WIDE_PLACES else 8
            return min(numel, max(1, ceil(self.ratio * numel))) * (item_bytes + places)
        return sign_bytes(numel, 1 if self.algorithm == "1bit" else 2)

    def refuse_unknown_hosts(self, world_size: int) -> None:
        """Raise UnsupportedError if the messages depend on the number of ranks per host and it is not known."""
        if self.hierarchical and (not self.host_ranks or world_size % self.host_ranks):
            raise UnsupportedError(
                "gradient_compression.hierarchical_compress",
                True,
                "what is compressed depends on how many ranks each host has",
            )


def read_compression(config: Mapping[str, Any]) -> Compression | None:
    """Return the gradient compression of ``config``, or None if it does not compress gradients.

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
