"""Attention over sequences that are partitioned over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.sequence_parallel.head_exchange import exchange
from zero_runtime.sequence_parallel.pieces import sequence_group

_HEADS = 2  # dimension


class DistributedAttention(torch.nn.Module):
    """A wrapper of an attention for sequences that are partitioned over the ranks.

    Inside the attention, a rank has complete sequences of some heads. Outside, it has shards of sequences of
    all heads. Query, key and value are exchanged with one all_to_all each, and the output with one more
    all_to_all. The backward pass issues the same number.

    Args:
        local_attention: The attention, which is called with query, key and value of this rank's heads.
        sequence_process_group: The sequence-parallel ranks. None means the ranks of ``sequence_parallel_size``.
        scatter_idx: The dimension of the heads, which must be 2.
        gather_idx: The dimension of the sequence, 0 or 1. ``forward`` does not use this value, but derives
            the dimension from that of the batch.
        sp_stream: A stream for overlapped messages, which is not in this version.
        num_kv_heads: The number of heads of key and value, which is checked.

    Raises:
        ConfigError: A dimension has another value, or a stream is passed.
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
        """Set ``name`` as the name of the module in the records of its messages."""
        self._why = hooks.tag("activation", module=name)

    @property
    def group(self) -> DataParallelGroup:
        """The sequence-parallel ranks."""
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
        rotary_pos_emb: Sequence[torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute the attention. The order of the arguments is DeepSpeed's.

        Args:
            query: The query, of shape (batch, sequence / ranks, heads, width). With ``batch_dim_idx`` 1 the
                shape is (sequence / ranks, batch, heads, width).
            key: The key, of the same shape as the query, but possibly with fewer heads.
            value: The value, of the same shape as ``key``.
            batch_dim_idx: The dimension of the batch, 0 or 1.
            rotary_pos_emb: The cosines and sines of rotary positions for complete sequences, each of shape
                (sequence, 1, 1, rotated width). Query and key are rotated with them, or not rotated if the
                value is None.
            args: Positional arguments that are passed to the attention after query, key and value. These
                three have complete sequences and heads / ranks heads. The output of the attention must have
                the same dimensions.
            kwargs: Keyword arguments that are passed to the attention.

        Raises:
            UsageError: The number of ranks does not divide the heads, or the dimensions of the query are wrong.
        """
        sequence = 1 - batch_dim_idx
        self._check(query, key, batch_dim_idx)
        query, key, value = (
            exchange(each, self.group, _HEADS, sequence, self._why) for each in (query, key, value)
        )
        if rotary_pos_emb is not None:
            cosines, sines = (each.transpose(0, sequence) for each in rotary_pos_emb)
            query, key = _rotated(query, cosines, sines), _rotated(key, cosines, sines)
        attended = self.local_attn(query, key, value, *args, **kwargs)
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


def _rotated(tensor: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with rotary positions applied to the first elements of its last dimension."""
    width = cosines.shape[-1]
    turned, rest = tensor[..., :width], tensor[..., width:]
    first, second = turned.chunk(2, -1)
    turned = turned * cosines + torch.cat((-second, first), -1) * sines
    return torch.cat((turned, rest), -1)


def name_attention(module: torch.nn.Module) -> None:
    """Give each distributed attention in ``module`` its qualified name, which is used in traces."""
    for name, child in module.named_modules():
        if isinstance(child, DistributedAttention):
            child.name(name)
