"""Norms of gradients, and gradient clipping.

Clipping multiplies gradients by min(1, limit / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup

_EPSILON: Final = 1e-6
_ROW: Final = 1024  # elements
_NORM: Final = hooks.tag("gradient_norm")
_INVALID_NORM: Final = float("inf")
_CHUNK: Final = 2**20  # elements; whole rows


def sharded_norm(
    shards: Sequence[torch.Tensor],
    group: DataParallelGroup,
    dtype: torch.dtype = torch.float32,
    expert_ranks: Sequence[DataParallelGroup | None] = (),
) -> torch.Tensor:
    """Return the 2-norm of sharded gradients, with one all_reduce for each param group.

    The norm of each param group of experts is averaged over the ranks that store the experts, as in DeepSpeed.
    This needs one more all_reduce for each of these param groups. The norm is already equal on all of these
    ranks.

    Args:
        shards: This rank's shard of every param group; 1-D.
        group: The ranks among which the gradients are sharded.
        dtype: The dtype in which the squares are summed over the ranks.
        expert_ranks: For each param group, the ranks that store its experts, or None if it has no experts.
            Empty if the model has no experts.

    Returns:
        A 0-D tensor of dtype ``dtype`` on the shards' device; infinity if the norm is infinite or NaN.
    """
    norms = []
    for shard in shards:
        squared = sum_of_squares(shard).to(dtype)
        group.all_reduce(squared, why=_NORM)
        norms.append(squared.sqrt())
    for index, ranks in enumerate(expert_ranks):
        if ranks is not None:
            norms[index] = averaged_norm(norms[index], ranks)
    return _valid(torch.linalg.vector_norm(torch.stack(norms)))


def joint_norm(
    squares: Sequence[torch.Tensor], groups: Sequence[DataParallelGroup], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the 2-norm of gradients sharded along several axes, with one all_reduce for each axis and param group.

    Args:
        squares: For each param group, the sum of squares of the elements that this rank counts; 0-D.
        groups: The process groups along the axes. Exactly one rank of their product must count each element.
        dtype: The dtype in which the squares are summed over the ranks.
    """
    norms = []
    for each in squares:
        squared = each.to(dtype)
        for group in groups:
            group.all_reduce(squared, why=_NORM)
        norms.append(squared.sqrt())
    return _valid(torch.linalg.vector_norm(torch.stack(norms)))


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of 1-D ``values`` as a 0-D fp64 tensor; relative error 2e-7.

    Short rows are summed in fp32, and the sums of the rows are added in fp64. An fp64 copy of all values takes
    20 times as long.
    """
    even = values.numel() - values.numel() % _ROW
    # 16-bit values are copied to fp32 one chunk at a time, to limit the memory.
    chunks = values[:even].split(even if values.dtype is torch.float32 and even else _CHUNK)
    rows = [torch.linalg.vector_norm(chunk.float().view(-1, _ROW), dim=1) for chunk in chunks]
    rest = torch.linalg.vector_norm(values[even:].float(), dtype=torch.float64)
    return torch.cat(rows).double().square().sum() + rest.square()


def replicated_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of replicated gradients, without communication; infinity if the norm is infinite or NaN."""
    norms = torch._foreach_norm([gradient.detach().float() for gradient in gradients])
    return _valid(torch.linalg.vector_norm(torch.stack(norms)))


def norm_with_experts(
    dense: Sequence[torch.Tensor], gradients: Mapping[DataParallelGroup, Sequence[torch.Tensor]]
) -> torch.Tensor:
    """Return the 2-norm of all gradients, including those of experts.

    Args:
        dense: The gradients of all parameters except experts, equal on all ranks. Empty if only experts are
            trained.
        gradients: The gradients of this rank's experts. Each key is the group of ranks that have the other
            experts of the same layers. There is one all_reduce for each group.
    """
    norms = [replicated_norm(dense)] if dense else []
    for ranks, each in gradients.items():
        squared = (
            torch.stack(torch._foreach_norm([gradient.detach().float() for gradient in each])).square().sum()
        )
        if ranks.world_size > 1:
            ranks.all_reduce(squared, why=_NORM)
        norms.append(squared.sqrt())
    return _valid(torch.linalg.vector_norm(torch.stack(norms)))


def averaged_norm(norm: torch.Tensor, group: DataParallelGroup) -> torch.Tensor:
    """Return ``norm`` averaged over the ranks by one all_reduce of one element, as DeepSpeed's fp32 stage 0 does."""
    norm = norm / group.world_size
    group.all_reduce(norm, why=_NORM)
    return norm


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the 0-D factor that limits gradients of norm ``norm`` to the norm ``limit``."""
    return torch.clamp(limit / (norm + _EPSILON), max=1.0)


def _valid(norm: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(norm), norm, torch.full_like(norm, _INVALID_NORM))
