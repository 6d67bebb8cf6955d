"""The collectives between partitioned layers, with their collectives in the backward pass.

In a *region* the ranks work on different columns of activations, or on different shards of sequences.
Activations enter and leave regions. The forward collective at the entry is the backward collective at the
exit, and vice versa:

====================  =============================  =============================
function              forward                        backward
====================  =============================  =============================
enter_columns         nothing                        all_reduce
leave_columns         all_reduce                     nothing
gather_columns        all_gather, last dimension     nothing: its own columns
gather_sequence       all_gather along the sequence  reduce_scatter along it
scatter_sequence      reduce_scatter along it        all_gather along it
split_sequence        nothing: its own shard         all_gather along it
====================  =============================  =============================

Activations have the shape (batch, sequence, width), so the sequence is the second-to-last dimension.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError

SEQUENCE_DIM: Final = -2
_COLUMN_DIM: Final = -1


class Ranks:
    """The tensor-parallel ranks of a module, and the tag of the module's messages.

    Args:
        group: The process group of the ranks.
        module: The qualified name of the module in traces.
    """

    def __init__(self, group: DataParallelGroup, module: str = "") -> None:
        self.group = group
        self.why = hooks.tag("activation", module=module or None)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.world_size

    @property
    def rank(self) -> int:
        """The number of this process among the tensor-parallel ranks."""
        return self.group.rank

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``tensor`` over the ranks. ``tensor`` itself does not change."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        self.group.all_reduce(total, why=self.why)
        return total

    def gathered(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tensors of all ranks concatenated along ``dim``."""
        first = tensor.movedim(dim, 0).contiguous()
        everything = first.new_empty((self.size * first.shape[0], *first.shape[1:]))
        self.group.all_gather_single(everything.view(-1), first.view(-1), why=self.why)
        return everything.movedim(0, dim)

    def scattered(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's shard along ``dim`` of the sum of ``tensor`` over the ranks."""
        self.check(tensor, dim)
        first = tensor.movedim(dim, 0).contiguous()
        own = first.new_empty((first.shape[0] // self.size, *first.shape[1:]))
        self.group.reduce_scatter_single(own.view(-1), first.view(-1), why=self.why)
        return own.movedim(0, dim)

    def shard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's shard of ``tensor`` along ``dim``."""
        self.check(tensor, dim)
        return tensor.chunk(self.size, dim)[self.rank]

    def check(self, tensor: torch.Tensor, dim: int) -> None:
        """Check that ``tensor`` can be partitioned evenly along ``dim``.

        Raises:
            UsageError: The number of ranks does not divide the dimension.
        """
        if tensor.shape[dim] % self.size:
            raise UsageError(
                f"{self.why.module or 'a module'}: {tensor.shape[dim]} elements along dimension {dim} of a tensor of shape "
                f"{tuple(tensor.shape)} cannot be shared by {self.size} ranks evenly; use sequences whose length is a "
                f"multiple of {self.size}"
            )


class _EnterColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.ranks.summed(gradient), None


class _LeaveColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return ranks.summed(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.gathered(tensor, _COLUMN_DIM)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.ranks.shard(gradient, _COLUMN_DIM), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.gathered(tensor, SEQUENCE_DIM)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.ranks.scattered(gradient, SEQUENCE_DIM), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.scattered(tensor, SEQUENCE_DIM)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.ranks.gathered(gradient, SEQUENCE_DIM), None


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.shard(tensor, SEQUENCE_DIM).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.ranks.gathered(gradient, SEQUENCE_DIM), None


def enter_columns(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return ``tensor``, which is equal on all ranks, at the entry of a region of columns."""
    return _apply(_EnterColumns, tensor, ranks)


def leave_columns(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return the sum of the ranks' outputs, at the exit of a region of columns."""
    return _apply(_LeaveColumns, tensor, ranks)


def gather_columns(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return the columns of all ranks, for a computation that is equal on all ranks."""
    return _apply(_GatherColumns, tensor, ranks)


def gather_sequence(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return complete sequences, gathered from their shards, at the entry of a region of columns."""
    return _apply(_GatherSequence, tensor, ranks)


def scatter_sequence(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return this rank's shard of the sum of the ranks' outputs, at the exit of a region of columns."""
    return _apply(_ScatterSequence, tensor, ranks)


def split_sequence(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return this rank's shard of sequences that are equal on all ranks."""
    return _apply(_SplitSequence, tensor, ranks)


def _apply(function: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    applied: torch.Tensor = function.apply(tensor, ranks)
    return applied


def sum_gradients(parameter: torch.nn.Parameter, ranks: Ranks, name: str = "") -> None:
    """Sum the gradients of ``parameter`` over the ranks in every backward pass.

    This is necessary because the gradients of a rank cover only its shard of the sequences.
    """
    why = hooks.tag("activation", module=ranks.why.module, parameters=(name,) if name else ())

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ranks.group.all_reduce(total, why=why)
        return total

    parameter.register_hook(summed)
