"""Packing of small codes into bytes on any device. The first code is in the lowest bits."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch.nn import functional

BYTE: Final = 8


def packed_bytes(numel: int, width: int) -> int:
    """Return the number of bytes of ``numel`` packed codes of ``width`` bits."""
    return -(-numel * width // BYTE)


def pack(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``codes`` packed into bytes. The last byte is padded with zeros.

    Args:
        codes: The codes (uint8, 1-D), each below 2^width.
        width: The number of bits of a code: 1, 2 or 4.
    """
    each = BYTE // width
    missing = -codes.numel() % each
    rows = (functional.pad(codes, (0, missing)) if missing else codes).view(-1, each)
    packed = rows[:, 0].clone()
    for place in range(1, each):
        packed |= rows[:, place] << (place * width)
    return packed


def unpack(packed: torch.Tensor, numel: int, width: int) -> torch.Tensor:
    """Return the first ``numel`` codes of the output of :func:`pack`, uint8."""
    shifts = torch.arange(0, BYTE, width, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(1) >> shifts) & ((1 << width) - 1)
    return codes.view(-1).narrow(0, 0, numel)


def looked_up(packed: torch.Tensor, numel: int, width: int, levels: tuple[float, ...]) -> torch.Tensor:
    """Return the values of the first ``numel`` codes as fp32. The value of a code c is ``levels[c]``."""
    table = _table(width, levels).to(packed.device)
    return table[packed.int()].view(-1).narrow(0, 0, numel)


@cache
def _table(width: int, levels: tuple[float, ...]) -> torch.Tensor:
    """Return a table with one row for each byte value, which contains the levels of the byte's codes."""
    every = unpack(torch.arange(256, dtype=torch.uint8), 256 * BYTE // width, width)
    return torch.tensor(levels)[every.int()].view(256, BYTE // width)
