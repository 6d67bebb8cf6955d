"""The buckets of one DistributedDataParallel in the order of its C++ reducer, and the bucket that is due next."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commprof.recorder.training.wrapped import Wrapped
from commprof.schema import PASSES


class Bucket(NamedTuple):
    """The gradients that travel together. ``capacity`` is in bytes; None for no limit."""

    numel: int
    names: tuple[str, ...]
    capacity: int | None


class Assignment(NamedTuple):
    """What torch computed for a new reducer: the limits, and the parameters of each bucket by their positions."""

    limits: tuple[int, ...]
    indices: tuple[tuple[int, ...], ...]


class Reduction:
    """The reducer of one model: its buckets in the order in which it reduces them, and the next one.

    Args:
        group: name of its process group.
        parameters: what it reduces.
        names: of the parameters, by their ``id``.
        assignment: of the parameters to buckets at construction; None where it could not be seen.
    """

    def __init__(
        self,
        group: str,
        parameters: Sequence[torch.Tensor],
        names: Mapping[int, str],
        assignment: Assignment | None,
    ) -> None:
        self.group = group
        self.wrapped: Wrapped | None = None
        self.hook: str | None = None  # the communication hook, by its name
        self._ids = frozenset(map(id, parameters))
        self.names = names
        self.parameters = len(parameters)
        self.rebuilt = False
        self.due: int | None = None  # the bucket that comes next, from the end of a forward pass on
        self._lost = False
        self.buckets: list[Bucket] = []
        if assignment is not None:
            filled = [[parameters[index] for index in indices] for indices in assignment.indices]
            # The reducer takes the last first, since so the gradients come.
            self.buckets = self._limited(filled, assignment.limits)[::-1]

    def read(self, reducer: Any, limits: Sequence[int]) -> None:
        """Take the buckets from ``reducer`` itself, which has built them anew by ``limits`` in bytes."""
        with _Unallocated():
            content = reducer._get_zeros_like_grad_buckets()
        self.buckets = self._limited([each.parameters() for each in content], limits)
        self.rebuilt = True

    def expect(self) -> None:
        """A backward pass may come that reduces all buckets."""
        self.due = 0
        self._lost = not self.buckets

    def is_due(self, numel: int) -> bool:
        """Whether the next bucket is one of ``numel`` elements."""
        return self.due is not None and self.due < len(self.buckets) and self.buckets[self.due].numel == numel

    def lose(self) -> None:
        """The order is not known any more: no bucket can be identified until the next forward pass."""
        self.due = len(self.buckets)
        self._lost = True

    @property
    def waits(self) -> bool:
        """Whether gradients are still to be reduced, as far as is known."""
        return self.due is not None and (self._lost or self.due < len(self.buckets))

    def take(self) -> tuple[int, Bucket]:
        """The next bucket and its number; it is due no more."""
        number = self.due or 0
        self.due = number + 1
        if number == 0:
            self.ran(PASSES[3])
        return number, self.buckets[number]

    def ran(self, kind: str) -> None:
        """A pass of the model began, of ``schema.PASSES``."""
        if self.wrapped is not None:
            self.wrapped.ran(kind)

    def holds(self, parameters: Set[int]) -> bool:
        """Whether parameters with these ids are among those that it reduces."""
        return bool(parameters & self._ids)

    def _limited(self, filled: Sequence[Sequence[torch.Tensor]], limits: Sequence[int]) -> list[Bucket]:
        """The buckets in the order in which torch filled them: of each dtype the n-th has the n-th limit, or the last."""
        before: Counter[torch.dtype] = Counter()
        buckets = []
        for members in filled:
            dtype = members[0].dtype
            limit = limits[min(before[dtype], len(limits) - 1)] if limits else sys.maxsize
            before[dtype] += 1
            buckets.append(
                Bucket(
                    sum(member.numel() for member in members),
                    tuple(self.names.get(id(member), "?") for member in members),
                    None if limit >= sys.maxsize else int(limit),
                )
            )
        return buckets


class _Unallocated(TorchDispatchMode):
    """The reducer shows its buckets as tensors of zeros as large as they are: this makes them without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))
