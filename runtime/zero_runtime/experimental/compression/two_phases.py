"""Compressed sums in two phases, in which the bytes sent by a rank do not grow with the number of ranks.

First, each rank receives the compressed values of all ranks for its share of the numbers, and sums these
values. Then each rank compresses its sum and sends the result to all ranks.

Let n be the number of ranks and C the bytes of the payload of all numbers. A rank sends 2(n-1)/n C, while a
gather of all payloads sends (n-1) C. The rank of a share stores the residual of the second compression, and
adds the residual the next time (Tang et al., arXiv:2102.02888: the errors of workers and of the server).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, Work
from zero_runtime.experimental.compression.codecs import BLOCK, Codec
from zero_runtime.experimental.compression.residuals import OF_SHARE, Residuals
from zero_runtime.gradient_reduction.gradient_buckets import Entry


class Shared:
    """The values of one sum, and the tensors from which the values are taken.

    Args:
        values: The values (fp32, 1-D). The sum changes them.
        entries: The tensors from which the values are taken. Their elements are concatenated.
        start: The position of the first value in the concatenated elements.
        scale: The loss scale.
    """

    def __init__(
        self, values: torch.Tensor, entries: Sequence[Entry], start: int = 0, scale: float = 1.0
    ) -> None:
        self.values = values
        self.start = start
        self.scale = scale
        self.entries = entries
        self.shares = [replace(each, name=f"{OF_SHARE}{each.name}") for each in entries]


def share_numel(numel: int, ranks: int) -> int:
    """Return the length of the share of each of ``ranks``, in numbers. A share consists of complete codec blocks."""
    return -(-numel // (ranks * BLOCK)) * BLOCK


def begin(
    shared: Shared,
    codec: Codec,
    residuals: Residuals | None,
    group: DataParallelGroup,
    why: Callable[[str], hooks.tag],
    asynchronous: bool = False,
) -> tuple[Work | None, Callable[[], torch.Tensor]]:
    """Start to sum the values over ``group``.

    Args:
        shared: The values of this rank.
        codec: The codec. The length of its payloads must depend only on the number of values.
        residuals: This rank's residuals, or None without error feedback.
        group: The ranks.
        why: A function that returns the tag of a message with a given intended operation.
        asynchronous: Whether the call returns before the first message is complete.

    Returns:
        A work handle to wait for, or None, and a function to call after the wait. The function returns the
        sum, which is bitwise equal on all ranks.
    """
    numel, ranks = shared.values.numel(), group.world_size
    width = share_numel(numel, ranks)
    if residuals is not None:
        residuals.add_to(shared.values, shared.entries, shared.start, shared.scale)
    filled = functional.pad(shared.values, (0, ranks * width - numel)).view(ranks, width)
    payloads = torch.stack([codec.encode(row) for row in filled])
    if residuals is not None:
        lost = shared.values.sub_(_decoded(payloads, codec, width).narrow(0, 0, numel))
        residuals.keep(lost, shared.entries, shared.start, shared.scale)
    received = torch.empty_like(payloads)
    work = group.all_to_all_single(
        received.view(-1),
        payloads.view(-1),
        [payloads.shape[1]] * ranks,
        why=why("reduce_scatter"),
        asynchronous=asynchronous,
    )
    own = min(width, max(0, numel - group.rank * width))  # The last shares may be short or empty.

    def total() -> torch.Tensor:
        share = filled.new_zeros(width)
        for each in received:
            codec.add(each, share)
        share[own:] = 0.0  # A codec that cannot encode zero decodes the padding to other numbers.
        payload = _of_share(share, own, shared, codec, residuals, group.rank * width)
        gathered = payload.new_empty(ranks * payload.numel())
        group.all_gather_single(gathered, payload, why=why("all_reduce"))
        return _decoded(gathered.view(ranks, -1), codec, width).narrow(0, 0, numel)

    return work, total


def _of_share(
    share: torch.Tensor, own: int, shared: Shared, codec: Codec, residuals: Residuals | None, place: int
) -> torch.Tensor:
    """Return the payload of this rank's share of the sum.

    The first ``own`` numbers of the share are values, and the rest is padding. The share begins at the position
    ``place`` of all values.
    """
    if residuals is None:
        return codec.encode(share)
    values, start = share.narrow(0, 0, own), shared.start + place
    residuals.add_to(values, shared.shares, start, shared.scale)
    payload = codec.encode(share)
    lost = values - _decoded(payload.unsqueeze(0), codec, share.numel()).narrow(0, 0, own)
    residuals.keep(lost, shared.shares, start, shared.scale)
    return payload


def _decoded(payloads: torch.Tensor, codec: Codec, width: int) -> torch.Tensor:
    """Return the concatenated numbers of the decoded ``payloads``. Each payload has ``width`` numbers."""
    values = torch.zeros(len(payloads) * width, device=payloads.device)
    for row, payload in zip(values.split(width), payloads, strict=True):
        codec.add(payload, row)
    return values
