"""``deepspeed.sequence.layer``: the exchange of sharded sequences for sharded heads, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch

from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UnsupportedError
from zero_runtime.sequence_parallel.head_exchange import exchange

_HEADS = 2  # the dimension of the heads


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
        input: The input, of shape (batch, sequence, heads, width), or (sequence, batch, heads, width) with
            ``batch_dim_idx`` 1.
        scatter_idx: The dimension that is sharded afterwards.
        gather_idx: The dimension that is gathered. This argument has no effect, because it follows from
            ``scatter_idx``.
        batch_dim_idx: The dimension of the batch: 0 or 1.
        group: The sequence-parallel ranks.
        async_op: True requests overlapped messages, which are not in this version.
        handle: An object for overlapped messages, which are not in this version.
        type: This argument has no effect.
        num_kv_heads: This argument has no effect. The number of heads must be divisible by the number of ranks.

    Raises:
        UnsupportedError: ``async_op`` is true, or ``handle`` is not None.
        UsageError: The size of the dimension is not divisible by the number of ranks.
    """
    if async_op or handle is not None:
        raise UnsupportedError("single_all_to_all waits for its message here; leave async_op and handle out")
    ranks = group if isinstance(group, DataParallelGroup) else DataParallelGroup(group)
    sequence = 1 - batch_dim_idx
    if scatter_idx < _HEADS:
        return exchange(input, ranks, sequence, _HEADS)
    return exchange(input, ranks, _HEADS, sequence)


class _SeqAllToAll:
    """A class that calls :func:`single_all_to_all` and has the interface of an autograd function."""

    @staticmethod
    def apply(
        group: Any,
        input: torch.Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int,
        *more: Any,
    ) -> torch.Tensor:
        """Call :func:`single_all_to_all`. Further arguments of DeepSpeed are ignored."""
        return single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group)
