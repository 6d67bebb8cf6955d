"""Tracks the buckets of a DistributedDataParallel model in the order in which its C++ reducer reduces them."""

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
    """A bucket of gradients.

    Attributes:
        numel: The number of elements in the bucket.
        names: The names of the parameters in the bucket.
        capacity: The capacity in bytes; None if there is no limit.
    """

    numel: int
    names: tuple[str, ...]
    capacity: int | None


class Assignment(NamedTuple):
    """The assignment of parameters to buckets that torch computed for a new reducer.

    Attributes:
        limits: The limits of the bucket sizes, in bytes.
        indices: For each bucket, the positions of its parameters.
    """

    limits: tuple[int, ...]
    indices: tuple[tuple[int, ...], ...]


class Reduction:
    """The buckets of one model's reducer in the order in which they are reduced, and the bucket that is reduced next.

    Args:
        group: The name of the process group of the reducer.
        parameters: The parameters whose gradients are reduced.
        names: The names of the parameters by their ``id``.
        assignment: The assignment of parameters to buckets at construction; None if it could not be observed.
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
        self.hook: str | None = None  # the name of the communication hook
        self._ids = frozenset(map(id, parameters))
        self.names = names
        self.parameters = len(parameters)
        self.rebuilt = False
        self.due: int | None = None  # the next bucket, known from the end of a forward pass on
        self._lost = False
        self.buckets: list[Bucket] = []
        if assignment is not None:
            filled = [[parameters[index] for index in indices] for indices in assignment.indices]
            # The reducer reduces the last bucket first, because gradients become ready in reverse order.
            self.buckets = self._limited(filled, assignment.limits)[::-1]

    def read(self, reducer: Any, limits: Sequence[int]) -> None:
        """Read the buckets that ``reducer`` has rebuilt with the given ``limits`` in bytes."""
        with _Unallocated():
            content = reducer._get_zeros_like_grad_buckets()
        self.buckets = self._limited([each.parameters() for each in content], limits)
        self.rebuilt = True

    def expect(self) -> None:
        """Expect a backward pass that reduces all buckets, after a forward pass has ended."""
        self.due = 0
        self._lost = not self.buckets

    def is_due(self, numel: int) -> bool:
        """Return whether the next bucket has ``numel`` elements."""
        return self.due is not None and self.due < len(self.buckets) and self.buckets[self.due].numel == numel

    def lose(self) -> None:
        """Note that the order is no longer known, so no bucket can be identified until the next forward pass."""
        self.due = len(self.buckets)
        self._lost = True

    @property
    def waits(self) -> bool:
        """Whether some gradients may not have been reduced yet."""
        return self.due is not None and (self._lost or self.due < len(self.buckets))

    def take(self) -> tuple[int, Bucket]:
        """Return the number of the next bucket and the bucket, and advance to the bucket after it."""
        number = self.due or 0
        self.due = number + 1
        if number == 0:
            self.ran(PASSES[3])
        return number, self.buckets[number]

    def ran(self, kind: str) -> None:
        """Report that the model began a pass. ``kind`` is one of ``schema.PASSES``, or ``schema.PASSES_UNKNOWN``."""
        if self.wrapped is not None:
            self.wrapped.ran(kind)

    def holds(self, parameters: Set[int]) -> bool:
        """Return whether the reducer reduces any parameter with one of these ids."""
        return bool(parameters & self._ids)

    def _limited(self, filled: Sequence[Sequence[torch.Tensor]], limits: Sequence[int]) -> list[Bucket]:
        """Return the buckets in the order in which torch filled them.

        Among the buckets of each dtype, the n-th bucket has the n-th limit, or the last limit if there are
        fewer limits.
        """
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
    """Makes the zero tensors in which the reducer shows its buckets without allocating memory for them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))
