"""The messages between layers that are cut, each with the message that its backward pass needs.

A *region* is where ranks work on different things: on columns of activations, or on pieces of sequences. Activations enter
it and leave it; what is sent forward on one side is sent backward on the other:

====================  =============================  =============================
function              forward                        backward
====================  =============================  =============================
enter_columns         nothing                        all_reduce
leave_columns         all_reduce                     nothing
gather_columns        all_gather, last dimension     nothing: its own columns
gather_sequence       all_gather along the sequence  reduce_scatter along it
scatter_sequence      reduce_scatter along it        all_gather along it
split_sequence        nothing: its own piece         all_gather along it
====================  =============================  =============================

The sequence is the last dimension but one: activations are (batch, sequence, width).
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
    """The ranks that share a module, and why they send each other its activations.

    Args:
        group: they.
        module: its qualified name, which traces show.
    """

    def __init__(self, group: DataParallelGroup, module: str = "") -> None:
        self.group = group
        self.why = hooks.tag("activation", module=module or None)

    @property
    def size(self) -> int:
        """How many."""
        return self.group.world_size

    @property
    def rank(self) -> int:
        """This process's number among them."""
        return self.group.rank

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks; ``tensor`` itself stays as it is."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        self.group.all_reduce(total, why=self.why)
        return total

    def gathered(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensors of all ranks end to end along ``dim``."""
        first = tensor.movedim(dim, 0).contiguous()
        everything = first.new_empty((self.size * first.shape[0], *first.shape[1:]))
        self.group.all_gather_single(everything.view(-1), first.view(-1), why=self.why)
        return everything.movedim(0, dim)

    def scattered(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's piece along ``dim`` of the sum over the ranks."""
        self.check(tensor, dim)
        first = tensor.movedim(dim, 0).contiguous()
        own = first.new_empty((first.shape[0] // self.size, *first.shape[1:]))
        self.group.reduce_scatter_single(own.view(-1), first.view(-1), why=self.why)
        return own.movedim(0, dim)

    def piece(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's piece along ``dim``."""
        self.check(tensor, dim)
        return tensor.chunk(self.size, dim)[self.rank]

    def check(self, tensor: torch.Tensor, dim: int) -> None:
        """Check that the ranks can share ``tensor`` evenly along ``dim``.

        Raises:
            UsageError: they cannot.
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
        return ctx.ranks.piece(gradient, _COLUMN_DIM), None


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
        return ranks.piece(tensor, SEQUENCE_DIM).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.ranks.gathered(gradient, SEQUENCE_DIM), None


def enter_columns(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """``tensor``, which all ranks have, before each works on other columns."""
    return _apply(_EnterColumns, tensor, ranks)


def leave_columns(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum of what the ranks have made of their columns."""
    return _apply(_LeaveColumns, tensor, ranks)


def gather_columns(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The columns of all ranks, of which every rank goes on to use all alike."""
    return _apply(_GatherColumns, tensor, ranks)


def gather_sequence(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Whole sequences of their pieces, before each rank works on other columns."""
    return _apply(_GatherSequence, tensor, ranks)


def scatter_sequence(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's piece of the sum of what the ranks have made of their columns."""
    return _apply(_ScatterSequence, tensor, ranks)


def split_sequence(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's piece of sequences that all ranks have alike."""
    return _apply(_SplitSequence, tensor, ranks)


def _apply(function: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    applied: torch.Tensor = function.apply(tensor, ranks)
    return applied


def sum_gradients(parameter: torch.nn.Parameter, ranks: Ranks, name: str = "") -> None:
    """Sum the gradients of ``parameter`` in every backward pass: each rank has those of its piece of the sequences."""
    why = hooks.tag("activation", module=ranks.why.module, parameters=(name,) if name else ())

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ranks.group.all_reduce(total, why=why)
        return total

    parameter.register_hook(summed)
