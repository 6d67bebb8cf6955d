"""Norms of gradients, and clipping by them.

Clipping multiplies gradients by min(1, limit / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    shards: Sequence[torch.Tensor], group: DataParallelGroup, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The 2-norm of all gradients, of which each rank holds pieces: one all_reduce for each piece (param group).

    Args:
        shards: this rank's piece of every param group; 1-D.
        group: the ranks that hold the others.
        dtype: in which the squares are summed over the ranks.

    Returns:
        A 0-D tensor of that dtype on the pieces' device; infinity where the norm is infinite or NaN.
    """
    norms = []
    for shard in shards:
        squared = sum_of_squares(shard).to(dtype)
        group.all_reduce(squared, why=_NORM)
        norms.append(squared.sqrt())
    return _valid(torch.linalg.vector_norm(torch.stack(norms)))


def joint_norm(
    squares: Sequence[torch.Tensor], groups: Sequence[DataParallelGroup], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The 2-norm of gradients that ranks of several axes hold parts of: an all_reduce along each for each param group.

    Args:
        squares: for each param group the sum of the squares of what this rank counts of it; 0-D.
        groups: along those axes; each element must be counted by one rank of their product.
        dtype: in which the squares are summed over the ranks.
    """
    norms = []
    for each in squares:
        squared = each.to(dtype)
        for group in groups:
            group.all_reduce(squared, why=_NORM)
        norms.append(squared.sqrt())
    return _valid(torch.linalg.vector_norm(torch.stack(norms)))


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of 1-D ``values``, a 0-D fp64 tensor; right to 2e-7.

    Rows short enough for fp32 are summed in it, and those sums in fp64. An fp64 copy of everything takes 20 times as long.
    """
    even = values.numel() - values.numel() % _ROW
    # An fp32 copy of 16-bit values is made of a chunk at a time.
    chunks = values[:even].split(even if values.dtype is torch.float32 and even else _CHUNK)
    rows = [torch.linalg.vector_norm(chunk.float().view(-1, _ROW), dim=1) for chunk in chunks]
    rest = torch.linalg.vector_norm(values[even:].float(), dtype=torch.float64)
    return torch.cat(rows).double().square().sum() + rest.square()


def replicated_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of gradients that every rank holds whole: nothing is sent. Infinity where it is infinite or NaN."""
    norms = torch._foreach_norm([gradient.detach().float() for gradient in gradients])
    return _valid(torch.linalg.vector_norm(torch.stack(norms)))


def averaged_norm(norm: torch.Tensor, group: DataParallelGroup) -> torch.Tensor:
    """``norm`` averaged over the ranks by one all_reduce of one element, as DeepSpeed's fp32 stage 0 does."""
    norm = norm / group.world_size
    group.all_reduce(norm, why=_NORM)
    return norm


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients of norm ``norm`` are multiplied by so that their norm is at most ``limit``; a 0-D tensor."""
    return torch.clamp(limit / (norm + _EPSILON), max=1.0)


def _valid(norm: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(norm), norm, torch.full_like(norm, _INVALID_NORM))
