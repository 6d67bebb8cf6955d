"""Attention over sequences of which each rank has a piece."""

from __future__ import annotations

from typing import Any

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.sequence_parallel.exchange import exchange
from zero_runtime.sequence_parallel.pieces import sequence_group

_HEADS = 2  # dimension


class DistributedAttention(torch.nn.Module):
    """Any attention, with whole sequences of some of the heads in it, and pieces of sequences of all heads outside.

    Query, key and value go in by one all_to_all each, and what the attention makes of them comes out by one; the backward
    pass takes as many.

    Args:
        local_attention: called with query, key and value of this rank's heads.
        sequence_process_group: the ranks that share the sequences; None for those of ``sequence_parallel_size``.
        scatter_idx: the dimension of heads, 2.
        gather_idx: the dimension of the sequence, 0 or 1; ``forward`` is told which by the dimension of the batch.
        sp_stream: for messages beside the computation, not in this version.
        num_kv_heads: checked: heads of key and value.

    Raises:
        ConfigError: another dimension, or a stream.
    """

    def __init__(
        self,
        local_attention: torch.nn.Module,
        sequence_process_group: Any = None,
        scatter_idx: int = _HEADS,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if scatter_idx != _HEADS or gather_idx not in (0, 1):
            raise ConfigError(
                f"scatter_idx is {scatter_idx} and gather_idx {gather_idx}; expected heads in dimension 2 and the "
                "sequence in 0 or 1"
            )
        if sp_stream is not None:
            raise ConfigError(
                "sp_stream is not in this version; leave it out: messages go in the current stream"
            )
        self.local_attn = local_attention
        self.num_kv_heads = num_kv_heads
        self._given = sequence_process_group
        self._group: DataParallelGroup | None = None
        self._why = hooks.tag("activation")

    def name(self, name: str) -> None:
        """Have traces show ``name`` as the module of the messages."""
        self._why = hooks.tag("activation", module=name)

    @property
    def group(self) -> DataParallelGroup:
        """The ranks that share the sequences."""
        if self._group is None:
            group = self._given
            if group is None:
                self._group = sequence_group()
            else:
                self._group = group if isinstance(group, DataParallelGroup) else DataParallelGroup(group)
        return self._group

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: (batch, sequence / ranks, heads, width), or with ``batch_dim_idx`` 1 (sequence / ranks, batch, heads,
                width).
            key: the same, of which there may be fewer heads.
            value: likewise.
            batch_dim_idx: the dimension of the batch: 0 or 1.
            args: given to the attention after the three, which have all of the sequence and heads / ranks; what it
                returns has their dimensions.
            kwargs: likewise.

        Raises:
            UsageError: the ranks cannot share the heads evenly.
        """
        sequence = 1 - batch_dim_idx
        self._check(query, key, batch_dim_idx)
        exchanged = [exchange(each, self.group, _HEADS, sequence, self._why) for each in (query, key, value)]
        attended = self.local_attn(*exchanged, *args, **kwargs)
        return exchange(attended, self.group, sequence, _HEADS, self._why)

    def _check(self, query: torch.Tensor, key: torch.Tensor, batch_dim_idx: int) -> None:
        if batch_dim_idx not in (0, 1) or query.dim() < 4:
            raise UsageError(
                f"query has shape {tuple(query.shape)} and batch_dim_idx is {batch_dim_idx}; expected (batch, sequence, "
                "heads, width) and 0, or (sequence, batch, heads, width) and 1"
            )
        size = self.group.world_size
        num_kv_heads = key.shape[_HEADS] if self.num_kv_heads is None else self.num_kv_heads
        for name, heads in (
            ("query", query.shape[_HEADS]),
            ("key and value", key.shape[_HEADS]),
            ("num_kv_heads", num_kv_heads),
        ):
            if heads % size:
                raise UsageError(
                    f"{name}: {heads} heads cannot be shared by {size} ranks evenly; use a sequence_parallel_size that "
                    f"divides {heads}"
                )


def name_attention(module: torch.nn.Module) -> None:
    """Have traces show the qualified names of the distributed attentions in ``module``."""
    for name, child in module.named_modules():
        if isinstance(child, DistributedAttention):
            child.name(name)
