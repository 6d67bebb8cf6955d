"""Shards of sequences: this rank's shard of a tensor, and the mean loss over all shards."""

from __future__ import annotations

from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError
from zero_runtime.groups.parallelism import current
from zero_runtime.groups.process_grid import SEQUENCE

_LOSS: Final = hooks.tag("metric")


def sequence_group() -> DataParallelGroup:
    """Return the sequence-parallel ranks of the training that was initialized last.

    Raises:
        UsageError: There is no training, or the training has no sequence parallelism.
    """
    parallelism = current()
    if parallelism is None or parallelism.grid is None or SEQUENCE not in parallelism.grid.topology.axes:
        raise UsageError(
            "no ranks share sequences: set sequence_parallel_size in the configuration and call zero_runtime.initialize "
            "first, or give the group"
        )
    return parallelism.grid.group(SEQUENCE)


def own_piece(tensor: torch.Tensor, dim: int = 1, group: DataParallelGroup | None = None) -> torch.Tensor:
    """Return this rank's shard of complete sequences, such as token ids, targets and positions.

    Args:
        tensor: The complete sequences, which are equal on all sequence-parallel ranks.
        dim: The dimension of the sequence.
        group: The sequence-parallel ranks. None means the ranks of ``sequence_parallel_size``.

    Raises:
        UsageError: The number of ranks does not divide the length of the sequence.
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
    """Return the mean loss of complete sequences from the means of their shards.

    The result is equal on all sequence-parallel ranks. As in DeepSpeed, the gradients of these ranks are
    summed. So the backward pass of this function multiplies the gradient of each rank by the rank's share of
    the elements.

    Args:
        loss: The mean loss over this rank's shard, a 0-D tensor.
        weight: The number of elements of this mean, if the number differs between ranks.
        group: The sequence-parallel ranks. None means the ranks of ``sequence_parallel_size``.
    """
    mean: torch.Tensor = _Mean.apply(loss, float(weight), group or sequence_group())
    return mean
