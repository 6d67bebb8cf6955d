"""Vocabulary-parallel cross entropy, which never gathers the logits of the ranks."""

from __future__ import annotations

from typing import Any

import torch

from zero_runtime.comm import ReduceOp
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.tensor_parallel.tensor_collectives import Ranks


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, words: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Return the loss of each row in fp32.

        Args:
            ctx: The context of autograd.
            logits: This rank's logits, of shape (rows, vocabulary / ranks).
            words: The token ids, int64 of shape (rows,).
            ranks: The tensor-parallel ranks.
        """
        count = logits.shape[1]
        highest = logits.detach().float().amax(1)
        ranks.group.all_reduce(highest, ReduceOp.MAX, why=ranks.why)
        shifted = logits.detach().float() - highest.unsqueeze(1)
        own = words - ranks.rank * count
        elsewhere = (own < 0) | (own >= count)
        own = own.masked_fill(elsewhere, 0)
        named = shifted.gather(1, own.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(1), named])
        ranks.group.all_reduce(sums, why=ranks.why)
        total, named = sums
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), own, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - named

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        probabilities, own, elsewhere = ctx.saved_tensors
        slope = probabilities.clone()
        slope.scatter_add_(1, own.unsqueeze(1), (elsewhere.float() - 1.0).unsqueeze(1))
        return slope.mul_(gradient.unsqueeze(1)).to(ctx.dtype), None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ranks: Ranks,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the cross entropy of vocabulary-parallel logits, which is equal on all ranks.

    The result is that of ``torch.nn.functional.cross_entropy``. The forward pass issues two all_reduce, of
    one and of two numbers for each row. The backward pass issues no collectives.

    Args:
        logits: The logits of this rank's part of the vocabulary, of shape (rows, vocabulary / ranks).
        target: The token ids, int64 of shape (rows,).
        ranks: The tensor-parallel ranks. Each rank has an equal part of the vocabulary, in rank order.
        ignore_index: The target of rows that do not count.
        reduction: ``mean``, ``sum`` or ``none``.

    Raises:
        UsageError: ``logits`` or ``target`` have other shapes.
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise UsageError(
            f"logits have shape {tuple(logits.shape)} and targets {tuple(target.shape)}; expected (rows, vocabulary / "
            "ranks) and (rows,)"
        )
    ignored = target == ignore_index
    losses: torch.Tensor = _CrossEntropy.apply(logits, target.masked_fill(ignored, 0), ranks)
    losses = losses.masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (~ignored).sum()


class VocabParallelCrossEntropy(torch.nn.CrossEntropyLoss):
    """A ``torch.nn.CrossEntropyLoss`` for the output of a column-parallel layer that is not gathered.

    Attributes:
        ranks: The tensor-parallel ranks.
    """

    ranks: Ranks

    @classmethod
    def of(cls, loss: torch.nn.CrossEntropyLoss, ranks: Ranks, name: str = "") -> VocabParallelCrossEntropy:
        """Return a vocabulary-parallel loss with the settings of ``loss``.

        Raises:
            ConfigError: ``loss`` has class weights or label smoothing.
        """
        if loss.weight is not None or loss.label_smoothing:
            raise ConfigError(
                f"{name} is a cross entropy with weights or label_smoothing {loss.label_smoothing}, which a "
                "vocabulary-parallel loss does not support; remove them, or gather the logits "
                '("column_gathered" in the plan) and leave the loss out of the plan'
            )
        shared = cls(ignore_index=loss.ignore_index, reduction=loss.reduction)
        shared.ranks = ranks
        return shared

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of logits (rows, vocabulary / ranks) or (batch, vocabulary / ranks, positions...)."""
        logits = input.movedim(1, -1)
        losses = vocab_parallel_cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            target.reshape(-1),
            self.ranks,
            self.ignore_index,
            self.reduction,
        )
        return losses.view(target.shape) if self.reduction == "none" else losses
