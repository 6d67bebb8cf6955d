"""Quantized reductions (4 bits) and parameter gathers (8 bits) of ZeRO++ (Wang et al., arXiv:2306.10209)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, Work, sum_of_rows
from zero_runtime.experimental.compression.quantization import dequantized, quantized
from zero_runtime.gradient_reduction.gradient_buckets import Bucket
from zero_runtime.gradient_reduction.reduction import Scattered

GRADIENT_BITS: Final = 4
WEIGHT_BITS: Final = 8


def scatter_quantized(rows: torch.Tensor, bucket: Bucket, group: DataParallelGroup) -> Scattered:
    """Start a reduce_scatter of quantized rows: each rank sends its row r to rank r, which sums the rows in fp32.

    ``rows`` are the concatenated rows of this rank, all of the same length.
    """
    world = group.world_size
    payloads = quantized(rows.view(world, -1), GRADIENT_BITS)
    received = torch.empty_like(payloads)
    work = group.all_to_all_single(
        received.view(-1),
        payloads.view(-1),
        [payloads.shape[1]] * world,
        why=bucket.why(intended_op="reduce_scatter"),
        asynchronous=bucket.asynchronous,
    )
    return work, lambda: sum_of_rows(dequantized(received, rows.numel() // world, GRADIENT_BITS))


def round_rows(rows: Sequence[torch.Tensor]) -> None:
    """Round ``rows`` in place to the values that a quantized gather would return, without communication."""
    for row in rows:
        row.copy_(dequantized(quantized(row.view(1, -1), WEIGHT_BITS), row.numel(), WEIGHT_BITS)[0])


def gather_quantized(
    rows: Sequence[torch.Tensor], group: DataParallelGroup, why: hooks.tag, asynchronous: bool
) -> tuple[Work | None, Callable[[], None]]:
    """Start to gather one row of each rank into ``rows``. This rank's own row is rounded too.

    All rows have the same length.

    Returns:
        A work handle, and a function that fills ``rows``, to be called when the work is complete.
    """
    payload = quantized(rows[group.rank].view(1, -1), WEIGHT_BITS)
    received = payload.new_empty(len(rows), payload.shape[1])
    work = group.all_gather_single(received.view(-1), payload.view(-1), why=why, asynchronous=asynchronous)

    def fill() -> None:
        for row, values in zip(rows, dequantized(received, rows[0].numel(), WEIGHT_BITS), strict=True):
            row.copy_(values)

    return work, fill
