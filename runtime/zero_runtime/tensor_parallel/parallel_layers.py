"""Tensor-parallel layers: column- and row-parallel linear layers, and vocabulary-parallel embeddings.

The method ``of`` constructs these layers from torch's layers. It takes over the parameters of a layer and
partitions them in place. So an optimizer that already has these parameters continues to work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch.nn import functional as F

from zero_runtime.errors import ConfigError
from zero_runtime.tensor_parallel.cuts import Cut, cut
from zero_runtime.tensor_parallel.tensor_collectives import (
    Ranks,
    enter_columns,
    gather_columns,
    gather_sequence,
    leave_columns,
    scatter_sequence,
    sum_gradients,
)

Layer = TypeVar("Layer", bound=torch.nn.Module)


class ColumnParallelLinear(torch.nn.Linear):
    """A column-parallel linear layer, in which each rank has some of the outputs. The input is equal on all ranks.

    Attributes:
        ranks: The tensor-parallel ranks.
        gathers: Whether the output is gathered from all ranks, so that each rank has all columns.
        outputs: The partition of the output.
        shares_sequence: Whether the input of each rank is a shard of the sequences. The layer then gathers
            the sequences first.
    """

    ranks: Ranks
    gathers: bool
    outputs: Cut
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
        """Partition ``layer``, and return the column-parallel layer.

        Args:
            layer: The layer, whose parameters are taken over.
            ranks: The tensor-parallel ranks.
            name: The name of the layer, for errors.
            sections: The numbers of outputs of layers that are joined in ``layer``, such as query, key and
                value. Each section is partitioned separately.
            gathers: Whether to gather the output.
            shares_sequence: Whether the input is sharded along the sequence.

        Raises:
            ConfigError: The number of ranks does not divide the outputs, or the sections do not add up to the
                outputs.
        """
        sections = sections or (layer.out_features,)
        if sum(sections) != layer.out_features:
            raise ConfigError(
                f"{name} has {layer.out_features} outputs, and the plan has the sections {list(sections)}, which makes "
                f"{sum(sections)}; they must be equal"
            )
        how = Cut(0, sections, ranks.rank, ranks.size)
        cut(f"{name}.weight", layer.weight, how)
        if layer.bias is not None:
            cut(f"{name}.bias", layer.bias, how)
        divided = _taken_over(cls, layer)
        divided.in_features, divided.out_features = layer.in_features, layer.out_features // ranks.size
        divided.ranks, divided.gathers, divided.shares_sequence = ranks, gathers, shares_sequence
        divided.outputs = replace(how, dim=-1)
        return divided

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the outputs of shape (..., this rank's outputs), or of all ranks if the outputs are gathered.

        ``input`` has the shape (..., inputs).
        """
        enter = gather_sequence if self.shares_sequence else enter_columns
        columns = F.linear(enter(input, self.ranks), self.weight, self.bias)
        if not self.gathers:
            return columns
        gathered = gather_columns(columns, self.ranks)
        if len(self.outputs.sections) == 1:
            return gathered
        # The gathered columns are in the order of the ranks, and each rank has a share of every section. The
        # output of the layer is in the order of the sections.
        return self.outputs.joined(gathered.chunk(self.ranks.size, -1))


class RowParallelLinear(torch.nn.Linear):
    """A row-parallel linear layer, in which each rank has some of the inputs.

    A preceding column-parallel layer computes these inputs.

    Attributes:
        ranks: The tensor-parallel ranks.
        shares_sequence: Whether each rank keeps a shard of the sequences of the output.
    """

    ranks: Ranks
    shares_sequence: bool

    @classmethod
    def of(
        cls, layer: torch.nn.Linear, ranks: Ranks, name: str = "", *, shares_sequence: bool = False
    ) -> RowParallelLinear:
        """Partition ``layer``, and return the row-parallel layer. The bias stays replicated.

        The arguments are those of :meth:`ColumnParallelLinear.of`.

        Raises:
            ConfigError: The number of ranks does not divide the inputs.
        """
        cut(f"{name}.weight", layer.weight, Cut(1, (layer.in_features,), ranks.rank, ranks.size))
        divided = _taken_over(cls, layer)
        divided.in_features, divided.out_features = layer.in_features // ranks.size, layer.out_features
        divided.ranks, divided.shares_sequence = ranks, shares_sequence
        if shares_sequence and layer.bias is not None:
            sum_gradients(layer.bias, ranks, f"{name}.bias")
        return divided

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the outputs of shape (..., outputs), which are equal on all ranks.

        With ``shares_sequence``, return this rank's shard of the sequences instead. ``input`` has the shape
        (..., this rank's inputs).
        """
        leave = scatter_sequence if self.shares_sequence else leave_columns
        output = leave(F.linear(input, self.weight), self.ranks)
        return output if self.bias is None else output + self.bias


class VocabParallelEmbedding(torch.nn.Embedding):
    """A vocabulary-parallel embedding, in which each rank has a part of the vocabulary.

    Attributes:
        ranks: The tensor-parallel ranks.
        first: The first token id of this rank.
        shares_sequence: Whether each rank keeps a shard of the sequences of the output.
    """

    ranks: Ranks
    first: int
    shares_sequence: bool

    @classmethod
    def of(
        cls, layer: torch.nn.Embedding, ranks: Ranks, name: str = "", *, shares_sequence: bool = False
    ) -> VocabParallelEmbedding:
        """Partition ``layer``, and return the vocabulary-parallel embedding.

        The arguments are those of :meth:`ColumnParallelLinear.of`.

        Raises:
            ConfigError: The number of ranks does not divide the vocabulary, or ``layer`` renormalizes
                embeddings or scales gradients by frequency.
        """
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise ConfigError(
                f"{name} is an embedding with max_norm {layer.max_norm} and scale_grad_by_freq {layer.scale_grad_by_freq}, "
                "which need the whole vocabulary on one rank; leave it out of the plan"
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
        """Return the embeddings of shape (..., width), which are equal on all ranks.

        With ``shares_sequence``, return this rank's shard of the sequences instead. ``input`` contains token
        ids in any shape.
        """
        own = input - self.first
        elsewhere = (own < 0) | (own >= self.num_embeddings)
        rows = F.embedding(own.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        leave = scatter_sequence if self.shares_sequence else leave_columns
        return leave(rows, self.ranks)


def _taken_over(cls: type[Layer], layer: torch.nn.Module) -> Layer:
    """Return a module of class ``cls`` that has all attributes of ``layer``, without a call of its constructor."""
    divided = cls.__new__(cls)
    divided.__dict__.update(layer.__dict__)
    return divided
