"""``deepspeed.sequence.layer``: the exchange of sharded sequences for sharded heads, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch

from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UnsupportedError
from zero_runtime.sequence_parallel.head_exchange import exchange

_HEADS = 2  # dimension


def single_all_to_all(
    input: torch.Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: Any,
    async_op: bool = False,
    handle: Any = None,
    type: Any = None,
    num_kv_heads: int | None = None,
) -> torch.Tensor:
    """Exchange sharded sequences for sharded heads (``scatter_idx`` 2), or the reverse (``scatter_idx`` below 2).

    Args:
        input: (batch, sequence, heads, width), or (sequence, batch, heads, width) with ``batch_dim_idx`` 1.
        scatter_idx: the dimension that is sharded afterwards.
        gather_idx: accepted; it is the other dimension.
        batch_dim_idx: 0 or 1.
        group: the sequence-parallel ranks.
        async_op: for overlapped messages, which are not in this version.
        handle: for overlapped messages, which are not in this version.
        type: accepted, without an effect.
        num_kv_heads: accepted; the number of ranks must divide the heads.

    Raises:
        UnsupportedError: ``async_op`` is true, or ``handle`` is not None.
        UsageError: the number of ranks does not divide the dimension.
    """
    if async_op or handle is not None:
        raise UnsupportedError("single_all_to_all waits for its message here; leave async_op and handle out")
    ranks = group if isinstance(group, DataParallelGroup) else DataParallelGroup(group)
    sequence = 1 - batch_dim_idx
    if scatter_idx < _HEADS:
        return exchange(input, ranks, sequence, _HEADS)
    return exchange(input, ranks, _HEADS, sequence)


class _SeqAllToAll:
    """:func:`single_all_to_all` with the interface of an autograd function."""

    @staticmethod
    def apply(
        group: Any,
        input: torch.Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int,
        *more: Any,
    ) -> torch.Tensor:
        """As :func:`single_all_to_all`; DeepSpeed's other arguments are ignored."""
        return single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group)
