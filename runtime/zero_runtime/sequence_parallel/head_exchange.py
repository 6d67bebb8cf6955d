"""The exchange of the sharded dimension of a tensor, with one all_to_all forward and one all_to_all backward."""

from __future__ import annotations

from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError

_ACTIVATION: Final = hooks.tag("activation")


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: DataParallelGroup, scatter: int, gather: int, why: hooks.tag
    ) -> torch.Tensor:
        ctx.group, ctx.scatter, ctx.gather, ctx.why = group, scatter, gather, why
        return _exchanged(tensor, group, scatter, gather, why)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        back = _exchanged(gradient, ctx.group, ctx.gather, ctx.scatter, ctx.why)
        return back, None, None, None, None


def exchange(
    tensor: torch.Tensor,
    group: DataParallelGroup,
    scatter: int,
    gather: int,
    why: hooks.tag | None = None,
) -> torch.Tensor:
    """Shard dimension ``scatter`` of a tensor and gather dimension ``gather``.

    Args:
        tensor: The tensor, with the complete dimension ``scatter`` and this rank's shard of the dimension
            ``gather``.
        group: The ranks with the shards, in order.
        scatter: The dimension that is sharded in the result.
        gather: The dimension that is complete in the result.
        why: The tag of the message.

    Returns:
        The new tensor. The size of its dimension ``scatter`` is divided by the number of ranks, and the size
        of its dimension ``gather`` is multiplied by the number of ranks.

    Raises:
        UsageError: The number of ranks does not divide the dimension ``scatter``.
    """
    if tensor.shape[scatter] % group.world_size:
        raise UsageError(
            f"dimension {scatter} of a tensor of shape {tuple(tensor.shape)} cannot be shared by {group.world_size} ranks "
            f"evenly; make it a multiple of {group.world_size}"
        )
    exchanged: torch.Tensor = _Exchange.apply(tensor, group, scatter, gather, why or _ACTIVATION)
    return exchanged


def _exchanged(
    tensor: torch.Tensor, group: DataParallelGroup, scatter: int, gather: int, why: hooks.tag
) -> torch.Tensor:
    rows = torch.stack(tensor.chunk(group.world_size, scatter))
    received = torch.empty_like(rows)
    numels = [rows[0].numel()] * group.world_size
    group.all_to_all_single(received.view(-1), rows.view(-1), numels, why=why)
    return torch.cat(received.unbind(), gather)
