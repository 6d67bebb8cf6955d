"""Sequence parallelism (Ulysses), in which ranks have shards of every sequence.

Within attention, a rank has complete sequences of some of the heads instead.
"""

from __future__ import annotations

from zero_runtime.sequence_parallel.attention import DistributedAttention, name_attention
from zero_runtime.sequence_parallel.head_exchange import exchange
from zero_runtime.sequence_parallel.pieces import mean_over_sequence, own_piece, sequence_group

__all__ = [
    "DistributedAttention",
    "exchange",
    "mean_over_sequence",
    "name_attention",
    "own_piece",
    "sequence_group",
]
