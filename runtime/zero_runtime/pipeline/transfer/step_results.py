"""Losses and outputs of the last stage, and their communication to the other stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from commprof import hooks
from zero_runtime.pipeline.stage_grid import PipelineGrid

_METRIC: Final = hooks.tag("metric")


def mean_of(values: Sequence[Any], grid: PipelineGrid | None = None) -> Any:
    """Return the element-wise mean of tensors, or of tuples of tensors.

    With ``grid`` the mean is also over replicas, with one all_reduce for each tensor.
    """
    columns = [tree_flatten(value)[0] for value in values]
    structure = tree_flatten(values[0])[1]
    means = []
    for column in zip(*columns, strict=True):
        total = torch.zeros_like(column[0], dtype=torch.float32)
        for each in column:
            total += each
        means.append(total / len(column))
        if grid is not None and grid.data.world_size > 1:
            grid.data.all_reduce(means[-1], why=_METRIC)
            means[-1] /= grid.data.world_size
    return tree_unflatten(means, structure)


def share_loss(mean: torch.Tensor, grid: PipelineGrid) -> torch.Tensor:
    """Return the mean loss of all replicas on every rank.

    As in DeepSpeed, the message also contains the loss of the replica.

    Args:
        mean: The loss of this replica (0-D) on the last stage. On other stages the value is not used.
        grid: The ranks of stages and replicas.
    """
    losses = torch.stack([mean.float().reshape(()), mean.float().reshape(())])
    if grid.is_last and grid.data.world_size > 1:
        total = losses[1].clone()
        grid.data.all_reduce(total, why=_METRIC)
        losses[1] = total / grid.data.world_size
    if grid.num_stages > 1:
        grid.pipe.broadcast(losses, grid.num_stages - 1, why=_METRIC)
    return losses[1]


def share_result(result: torch.Tensor | None, grid: PipelineGrid) -> torch.Tensor:
    """Return the one-element ``result`` of the last stage on every stage."""
    shared = torch.zeros((), device=grid.device) if result is None else result.float().reshape(()).clone()
    if grid.num_stages > 1:
        grid.pipe.broadcast(shared, grid.num_stages - 1, why=_METRIC)
    return shared


def combined(outputs: Sequence[Any]) -> Any:
    """Return the outputs of micro-batches, joined along the first dimension.

    The outputs are tensors, or structures of tensors that are equal for all micro-batches.
    """
    if not outputs:
        return None
    columns = [tree_flatten(value)[0] for value in outputs]
    structure = tree_flatten(outputs[0])[1]
    joined = [
        torch.cat(column) if isinstance(column[0], torch.Tensor) and column[0].dim() else column[0]
        for column in zip(*columns, strict=True)
    ]
    return tree_unflatten(joined, structure)
