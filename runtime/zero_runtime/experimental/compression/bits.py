"""Packing of small codes into bytes, the first code in the lowest bits, on any device."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch.nn import functional

BYTE: Final = 8


def packed_bytes(numel: int, width: int) -> int:
    """Bytes that ``numel`` codes of ``width`` bits take."""
    return -(-numel * width // BYTE)


def pack(codes: torch.Tensor, width: int) -> torch.Tensor:
    """``codes`` (uint8, 1-D, each below 2^width) as bytes; the last byte is padded with zeros.

    Args:
        codes: the codes.
        width: bits of each: 1, 2 or 4.
    """
    each = BYTE // width
    missing = -codes.numel() % each
    rows = (functional.pad(codes, (0, missing)) if missing else codes).view(-1, each)
    packed = rows[:, 0].clone()
    for place in range(1, each):
        packed |= rows[:, place] << (place * width)
    return packed


def unpack(packed: torch.Tensor, numel: int, width: int) -> torch.Tensor:
    """The first ``numel`` codes of the output of :func:`pack`, uint8."""
    shifts = torch.arange(0, BYTE, width, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(1) >> shifts) & ((1 << width) - 1)
    return codes.view(-1).narrow(0, 0, numel)


def looked_up(packed: torch.Tensor, numel: int, width: int, levels: tuple[float, ...]) -> torch.Tensor:
    """The values of the first ``numel`` codes: ``levels`` by code, as fp32."""
    table = _table(width, levels).to(packed.device)
    return table[packed.int()].view(-1).narrow(0, 0, numel)


@cache
def _table(width: int, levels: tuple[float, ...]) -> torch.Tensor:
    """For each byte the levels of the codes in it."""
    every = unpack(torch.arange(256, dtype=torch.uint8), 256 * BYTE // width, width)
    return torch.tensor(levels)[every.int()].view(256, BYTE // width)
