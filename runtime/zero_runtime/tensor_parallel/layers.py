"""Layers whose parameters several ranks share: linear layers cut by columns or rows, and embeddings cut by words.

They are made of torch's layers (``of``), whose parameters they take over and cut in place, so that an optimizer that has
these already goes on with them.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.nn import functional as F

from zero_runtime.errors import ConfigError
from zero_runtime.tensor_parallel.collectives import (
    Ranks,
    enter_columns,
    gather_columns,
    gather_sequence,
    leave_columns,
    scatter_sequence,
    sum_gradients,
)
from zero_runtime.tensor_parallel.cuts import Cut, cut

Layer = TypeVar("Layer", bound=torch.nn.Module)


class ColumnParallelLinear(torch.nn.Linear):
    """A linear layer of which each rank has some of the outputs. Its input is the same on all ranks.

    Attributes:
        ranks: those that share it.
        gathers: whether its output is gathered from all ranks, so that each has all columns.
        shares_sequence: whether each rank gets a piece of the sequences, which are gathered first.
    """

    ranks: Ranks
    gathers: bool
    shares_sequence: bool

    @classmethod
    def of(
        cls,
        layer: torch.nn.Linear,
        ranks: Ranks,
        name: str = "",
        *,
        sections: tuple[int, ...] = (),
        gathers: bool = False,
        shares_sequence: bool = False,
    ) -> ColumnParallelLinear:
        """Cut ``layer``.

        Args:
            layer: what is cut; its parameters are this one's.
            ranks: those that share it.
            name: of the layer, for errors.
            sections: outputs of layers that are joined in this one, such as query, key and value: each is cut by itself.
            gathers: gather the output.
            shares_sequence: of sequence parallelism.

        Raises:
            ConfigError: the ranks cannot share the outputs evenly.
        """
        sections = sections or (layer.out_features,)
        if sum(sections) != layer.out_features:
            raise ConfigError(
                f"{name} has {layer.out_features} outputs, and the plan cuts sections {list(sections)}, which makes "
                f"{sum(sections)}; they must be equal"
            )
        how = Cut(0, sections, ranks.rank, ranks.size)
        cut(f"{name}.weight", layer.weight, how)
        if layer.bias is not None:
            cut(f"{name}.bias", layer.bias, how)
        divided = _taken_over(cls, layer)
        divided.in_features, divided.out_features = layer.in_features, layer.out_features // ranks.size
        divided.ranks, divided.gathers, divided.shares_sequence = ranks, gathers, shares_sequence
        return divided

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., this rank's outputs), or all outputs where they are gathered."""
        enter = gather_sequence if self.shares_sequence else enter_columns
        columns = F.linear(enter(input, self.ranks), self.weight, self.bias)
        return gather_columns(columns, self.ranks) if self.gathers else columns


class RowParallelLinear(torch.nn.Linear):
    """A linear layer of which each rank has some of the inputs, as a column-parallel one before it leaves them.

    Attributes:
        ranks: those that share it.
        shares_sequence: whether each rank keeps a piece of the sequences of the output.
    """

    ranks: Ranks
    shares_sequence: bool

    @classmethod
    def of(
        cls, layer: torch.nn.Linear, ranks: Ranks, name: str = "", *, shares_sequence: bool = False
    ) -> RowParallelLinear:
        """Cut ``layer``; its bias stays whole. The arguments are those of :meth:`ColumnParallelLinear.of`.

        Raises:
            ConfigError: the ranks cannot share the inputs evenly.
        """
        cut(f"{name}.weight", layer.weight, Cut(1, (layer.in_features,), ranks.rank, ranks.size))
        divided = _taken_over(cls, layer)
        divided.in_features, divided.out_features = layer.in_features // ranks.size, layer.out_features
        divided.ranks, divided.shares_sequence = ranks, shares_sequence
        if shares_sequence and layer.bias is not None:
            sum_gradients(layer.bias, ranks, f"{name}.bias")
        return divided

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., this rank's inputs) to (..., outputs), the same on all ranks, or this rank's piece of the sequences."""
        leave = scatter_sequence if self.shares_sequence else leave_columns
        output = leave(F.linear(input, self.weight), self.ranks)
        return output if self.bias is None else output + self.bias


class VocabParallelEmbedding(torch.nn.Embedding):
    """An embedding of which each rank has some of the words.

    Attributes:
        ranks: those that share it.
        first: this rank's first word.
        shares_sequence: whether each rank keeps a piece of the sequences of the output.
    """

    ranks: Ranks
    first: int
    shares_sequence: bool

    @classmethod
    def of(
        cls, layer: torch.nn.Embedding, ranks: Ranks, name: str = "", *, shares_sequence: bool = False
    ) -> VocabParallelEmbedding:
        """Cut ``layer``. The arguments are those of :meth:`ColumnParallelLinear.of`.

        Raises:
            ConfigError: the ranks cannot share the words evenly, or the layer renormalises or scales by frequency.
        """
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise ConfigError(
                f"{name} is an embedding with max_norm {layer.max_norm} and scale_grad_by_freq {layer.scale_grad_by_freq}, "
                "which need all words on one rank; leave it out of the plan"
            )
        cut(f"{name}.weight", layer.weight, Cut(0, (layer.num_embeddings,), ranks.rank, ranks.size))
        divided = _taken_over(cls, layer)
        divided.num_embeddings = layer.num_embeddings // ranks.size
        divided.ranks, divided.first, divided.shares_sequence = (
            ranks,
            ranks.rank * divided.num_embeddings,
            shares_sequence,
        )
        if layer.padding_idx is not None:
            own = layer.padding_idx - divided.first
            divided.padding_idx = own if 0 <= own < divided.num_embeddings else None
        return divided

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Word numbers of any shape to (..., width), the same on all ranks, or this rank's piece of the sequences."""
        own = input - self.first
        elsewhere = (own < 0) | (own >= self.num_embeddings)
        rows = F.embedding(own.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        leave = scatter_sequence if self.shares_sequence else leave_columns
        return leave(rows, self.ranks)


def _taken_over(cls: type[Layer], layer: torch.nn.Module) -> Layer:
    """A module of class ``cls`` with everything that ``layer`` has."""
    divided = cls.__new__(cls)
    divided.__dict__.update(layer.__dict__)
    return divided
