"""What a training on pieces of sequences needs besides attention: this rank's piece, and the loss of them all."""

from __future__ import annotations

from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError
from zero_runtime.groups.parallelism import current
from zero_runtime.groups.topology import SEQUENCE

_LOSS: Final = hooks.tag("metric")


def sequence_group() -> DataParallelGroup:
    """The ranks that share the sequences of the training that was initialised last.

    Raises:
        UsageError: there is none, or its ranks share no sequences.
    """
    parallelism = current()
    if parallelism is None or parallelism.grid is None or SEQUENCE not in parallelism.grid.topology.axes:
        raise UsageError(
            "no ranks share sequences: set sequence_parallel_size in the configuration and call zero_runtime.initialize "
            "first, or give the group"
        )
    return parallelism.grid.group(SEQUENCE)


def own_piece(tensor: torch.Tensor, dim: int = 1, group: DataParallelGroup | None = None) -> torch.Tensor:
    """This rank's piece of whole sequences, such as word numbers, targets and positions.

    Args:
        tensor: the same on all ranks that share the sequences.
        dim: of the sequence.
        group: those ranks; None for those of ``sequence_parallel_size``.

    Raises:
        UsageError: they cannot share it evenly.
    """
    ranks = group or sequence_group()
    if tensor.shape[dim] % ranks.world_size:
        raise UsageError(
            f"sequences of {tensor.shape[dim]} elements (dimension {dim} of shape {tuple(tensor.shape)}) cannot be shared "
            f"by {ranks.world_size} ranks evenly; pad them to a multiple of {ranks.world_size}"
        )
    return tensor.chunk(ranks.world_size, dim)[ranks.rank].contiguous()


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, weight: float, group: DataParallelGroup) -> torch.Tensor:
        sums = torch.stack([loss.detach().float() * weight, torch.tensor(weight, device=loss.device)])
        group.all_reduce(sums, why=_LOSS)
        ctx.share, ctx.dtype = weight / sums[1], loss.dtype
        return sums[0] / sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient * ctx.share).to(ctx.dtype), None, None


def mean_over_sequence(
    loss: torch.Tensor, weight: float = 1.0, group: DataParallelGroup | None = None
) -> torch.Tensor:
    """The mean loss of whole sequences, of the means of their pieces; the same on all ranks that share them.

    Gradients of those ranks are summed, as DeepSpeed sums them, so that each rank's loss must count its own piece with its
    share of the whole: that is what the backward pass of this does.

    Args:
        loss: the mean over this rank's piece, 0-D.
        weight: how many elements that is the mean of, where the ranks have unequally many.
        group: the ranks; None for those of ``sequence_parallel_size``.
    """
    mean: torch.Tensor = _Mean.apply(loss, float(weight), group or sequence_group())
    return mean
