"""Blockwise quantization to small integers (ZeRO++, Wang et al., arXiv:2306.10209).

A block of 256 numbers has one fp32 scale: the largest magnitude divided by the largest code, which is 127 for
8 bits and 7 for 4 bits. So n numbers of b bits take n b / 8 + 4 ceil(n / 256) bytes, and the error is at most
half a scale. If a number of a block is infinite or NaN, the whole block becomes NaN.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from zero_runtime.experimental.compression.bits import pack, packed_bytes, unpack

BLOCK: Final = 256
_SCALE_BYTES: Final = 4


def quantized_bytes(numel: int, bits: int) -> int:
    """Return the number of bytes of ``numel`` numbers of ``bits`` bits, with their scales."""
    return packed_bytes(numel, bits) + _SCALE_BYTES * -(-numel // BLOCK)


def quantized(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the payload of each row (uint8, 2-D): first the codes, then the scales.

    Args:
        rows: The numbers (floats, 2-D).
        bits: The number of bits of a code: 4 or 8.
    """
    count, numel = rows.shape
    blocks = functional.pad(rows.float(), (0, -numel % BLOCK)).view(count, -1, BLOCK)
    largest = (1 << (bits - 1)) - 1
    scales = blocks.abs().amax(2, keepdim=True) / largest
    rounded = (blocks / torch.where(scales == 0, 1.0, scales)).round_().nan_to_num_(0.0)
    codes = rounded.add_(largest + 1).to(torch.uint8).view(count, -1).narrow(1, 0, numel)
    packed = codes if bits == 8 else torch.stack([pack(row, bits) for row in codes])
    return torch.cat([packed, scales.view(count, -1).view(torch.uint8)], 1)


def dequantized(payloads: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """Return the rows of ``numel`` numbers (fp32, 2-D) in ``payloads`` of :func:`quantized`."""
    count, size = len(payloads), packed_bytes(numel, bits)
    packed = payloads.narrow(1, 0, size)
    codes = packed if bits == 8 else torch.stack([unpack(row, numel, bits) for row in packed])
    tail = payloads.narrow(1, size, payloads.shape[1] - size)
    scales = tail.reshape(-1).clone().view(torch.float32).view(count, -1)  # The copy is aligned.
    centered = codes.float().sub_(1 << (bits - 1))
    blocks = functional.pad(centered, (0, -numel % BLOCK)).view(count, -1, BLOCK)
    return blocks.mul_(scales.unsqueeze(2)).view(count, -1).narrow(1, 0, numel)
