"""``deepspeed.sequence.cross_entropy``: the loss of sharded sequences, with DeepSpeed's name."""

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
    """Return the cross-entropy of each token of whole sequences that are sharded over the ranks.

    In the backward pass, each rank keeps the gradient of its own shard, as in DeepSpeed, because all ranks have
    the same losses.

    Args:
        vocab_parallel_logits: The logits, of shape (sequence / ranks, batch, vocabulary). With ``tp_group``, the last
            dimension is vocabulary / ranks of ``tp_group``.
        target: The token ids, of shape (sequence / ranks, batch), int64.
        sp_group: The sequence-parallel ranks, in order.
        tp_group: The ranks that the vocabulary is partitioned over evenly, in order; None if each rank has the whole
            vocabulary.
        vocab_start_index: This argument has no effect, because the index follows from the rank.
        vocab_end_index: This argument has no effect, because the index follows from the rank.
        ignore_index: A target whose loss is 0.
        reduction: ``none``. Other reductions are not in this version.
        gather_sequence_loss: Whether the losses of all ranks are gathered. With False, each rank has the losses
            of its own shard.
        backend: ``torch``. Other backends are not in this version.

    Returns:
        The losses, of shape (sequence, batch), fp32. Without ``gather_sequence_loss``, the shape is that of ``target``.

    Raises:
        UnsupportedError: ``reduction`` or ``backend`` has another value.
        UsageError: The shapes of the arguments do not fit together.
    """
    if reduction != "none" or backend != "torch":
        raise UnsupportedError(
            f"vocab_sequence_parallel_cross_entropy got reduction {reduction!r} and backend {backend!r}; only 'none' and "
            "'torch' are in this version: sum or average what it returns"
        )
    if vocab_parallel_logits.shape[:-1] != target.shape or target.dim() != 2:
        raise UsageError(
            f"logits have shape {tuple(vocab_parallel_logits.shape)} and targets {tuple(target.shape)}; expected "
            "(sequence / ranks, batch, vocabulary) and (sequence / ranks, batch)"
        )
    rows, words = vocab_parallel_logits.flatten(0, 1), target.flatten()
    if tp_group is None:
        losses = torch.nn.functional.cross_entropy(
            rows.float(), words, ignore_index=ignore_index, reduction="none"
        )
    else:
        # Each rank has the logits of a part of the vocabulary, so the ranks must sum their exponentials.
        ranks = Ranks(DataParallelGroup(tp_group))
        losses = vocab_parallel_cross_entropy(rows, words, ranks, ignore_index, "none")
    losses = losses.view_as(target)
    if not gather_sequence_loss:
        return losses
    return gather_columns(losses.t(), Ranks(DataParallelGroup(sp_group))).t()
