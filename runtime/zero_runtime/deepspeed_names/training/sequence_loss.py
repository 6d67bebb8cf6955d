"""``deepspeed.sequence.cross_entropy``: the loss of sharded sequences, under DeepSpeed's name."""

from __future__ import annotations

from typing import Any

import torch

from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UnsupportedError, UsageError
from zero_runtime.tensor_parallel.parallel_loss import vocab_parallel_cross_entropy
from zero_runtime.tensor_parallel.tensor_collectives import Ranks, gather_columns


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    sp_group: Any,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "none",
    gather_sequence_loss: bool = True,
    backend: str = "torch",
) -> torch.Tensor:
    """The cross-entropy of each token of whole sequences that are sharded over the ranks.

    In the backward pass each rank keeps the gradient of its own shard, as in DeepSpeed: all ranks have the same losses.

    Args:
        vocab_parallel_logits: (sequence / ranks, batch, vocabulary), or vocabulary / ranks of ``tp_group``.
        target: (sequence / ranks, batch) int64, token ids.
        sp_group: the sequence-parallel ranks, in order.
        tp_group: the ranks that the vocabulary is partitioned over evenly, in order; None if each has all of it.
        vocab_start_index: accepted; it follows from the rank.
        vocab_end_index: accepted; it follows from the rank.
        ignore_index: a target whose loss is 0.
        reduction: none; others are not in this version.
        gather_sequence_loss: False leaves each rank its own shard of the losses.
        backend: torch.

    Returns:
        (sequence, batch) fp32.

    Raises:
        UnsupportedError: another reduction or backend.
        UsageError: shapes that do not belong together.
    """
    if reduction != "none" or backend != "torch":
        raise UnsupportedError(
            f"vocab_sequence_parallel_cross_entropy got reduction {reduction!r} and backend {backend!r}; only 'none' and "
            "'torch' are in this version: sum or average what it returns"
        )
    if vocab_parallel_logits.shape[:-1] != target.shape or target.dim() != 2:
        raise UsageError(
            f"logits have shape {tuple(vocab_parallel_logits.shape)} and targets {tuple(target.shape)}; expected "
            "(sequence / ranks, batch, words) and (sequence / ranks, batch)"
        )
    rows, words = vocab_parallel_logits.flatten(0, 1), target.flatten()
    if tp_group is None:
        losses = torch.nn.functional.cross_entropy(
            rows.float(), words, ignore_index=ignore_index, reduction="none"
        )
    else:
        ranks = Ranks(DataParallelGroup(tp_group))
        losses = vocab_parallel_cross_entropy(rows, words, ranks, ignore_index, "none")
    losses = losses.view_as(target)
    if not gather_sequence_loss:
        return losses
    return gather_columns(losses.t(), Ranks(DataParallelGroup(sp_group))).t()
