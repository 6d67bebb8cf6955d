"""The partition of a parameter over tensor-parallel ranks, without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from zero_runtime.errors import ConfigError

_ATTRIBUTE: Final = "zero_runtime_cut"


@dataclass(frozen=True, slots=True)
class Cut:
    """The partition of a parameter into equal shards along one dimension.

    Attributes:
        dim: The dimension.
        sections: The extents of the layers that are joined in one parameter, such as query, key and value.
            Each section is partitioned separately.
        rank: The number of this shard.
        size: The number of shards.
    """

    dim: int
    sections: tuple[int, ...]
    rank: int
    size: int

    def check(self, name: str) -> None:
        """Check that every section can be partitioned evenly.

        Raises:
            ConfigError: ``size`` does not divide a section of parameter ``name``.
        """
        for extent in self.sections:
            if extent % self.size:
                among = f" (of sections {list(self.sections)})" if len(self.sections) > 1 else ""
                raise ConfigError(
                    f"{name} has {extent} elements along dimension {self.dim}{among}, which {self.size} ranks cannot share "
                    f"evenly; choose a tp_size that divides {extent}, or leave the module out of the plan"
                )

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the complete ``tensor``, as a new tensor."""
        own_ranges = [
            section.chunk(self.size, self.dim)[self.rank] for section in tensor.split(self.sections, self.dim)
        ]
        return torch.cat(own_ranges, self.dim)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the complete parameter, from the ``shape`` of a shard."""
        return *shape[: self.dim], sum(self.sections), *shape[self.dim + 1 :]

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a shard, from the ``shape`` of the complete parameter."""
        return *shape[: self.dim], sum(self.sections) // self.size, *shape[self.dim + 1 :]

    def joined(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the complete parameter, from the ``shards`` of all ranks."""
        extents = [extent // self.size for extent in self.sections]
        by_rank = [shard.split(extents, self.dim) for shard in shards]
        return torch.cat(
            [portion for matching in zip(*by_rank, strict=True) for portion in matching], self.dim
        )


def cut_of(parameter: torch.Tensor) -> Cut | None:
    """Return the partition of ``parameter``, or None if every rank has the complete parameter."""
    cut = getattr(parameter, _ATTRIBUTE, None)
    return cut if isinstance(cut, Cut) else None


@torch.no_grad()
def cut(name: str, parameter: torch.Tensor, how: Cut) -> None:
    """Replace the data of ``parameter`` by this rank's shard. A second call for a tied parameter does nothing.

    Raises:
        ConfigError: ``parameter`` cannot be partitioned evenly, or is already partitioned in a different way.
    """
    before = cut_of(parameter)
    if before is not None:
        if before != how:
            raise ConfigError(
                f"{name} is tied to a parameter that is partitioned along {before.dim} in sections {list(before.sections)}, "
                f"and the plan partitions it along {how.dim} in sections {list(how.sections)}; partition both in "
                "the same way"
            )
        return
    how.check(name)
    parameter.data = how.part(parameter.data)
    if parameter.grad is not None:
        parameter.grad = None
    mark(parameter, how)


def mark(parameter: torch.Tensor, how: Cut) -> None:
    """Mark ``parameter`` as partitioned, with attributes of this package and of Megatron."""
    for name, value in ((_ATTRIBUTE, how), ("tensor_model_parallel", True), ("partition_dim", how.dim)):
        setattr(parameter, name, value)


def own_parts(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``state`` in which this rank's shards replace complete parameters.

    The replaced parameters are those that are partitioned in ``module``.
    """
    own = dict(state)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        how, value = cut_of(parameter), own.get(name)
        if how is None or not isinstance(value, torch.Tensor):
            continue
        if tuple(value.shape) == how.whole_shape(tuple(parameter.shape)):
            own[name] = how.part(value)
    return own
