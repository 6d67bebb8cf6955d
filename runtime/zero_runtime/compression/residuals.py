"""What compression left out of the gradients of this rank, to be added to the next ones (error feedback).

What is kept of each parameter is a tensor as long as its gradient, without the loss scale, and divided as gradients are
for their mean: the sum over the ranks is what the parameters have not got yet. A checkpoint keeps that of each rank; another
number of ranks shares the sum out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from zero_runtime.buckets import Entry

OF_SHARE: Final = (
    "share of "  # begins the name of what one rank alone has left over of an element, on behalf of all
)


class Residuals:
    """What this rank has left over, by parameter.

    Attributes:
        tensors: fp32, 1-D, by name; a parameter is in it from its first compressed gradient on.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def add_to(self, values: torch.Tensor, entries: Sequence[Entry], start: int, scale: float) -> None:
        """Add what is left over, times ``scale``, to ``values``: elements ``start`` and up of a bucket of ``entries``."""
        for part, mine in self._parts(values, entries, start):
            part.add_(mine, alpha=scale)

    def keep(self, values: torch.Tensor, entries: Sequence[Entry], start: int, scale: float) -> None:
        """Keep ``values``, divided by ``scale``, in place of what was left over.

        Values that are not finite would never go away again: where there are some, all stays as it was.
        """
        if not bool(torch.isfinite(values).all()):
            return
        for part, mine in self._parts(values, entries, start):
            torch.mul(part, 1.0 / scale, out=mine)

    def _parts(
        self, values: torch.Tensor, entries: Sequence[Entry], start: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of ``values`` that belong to each parameter, and what is left over of the same elements."""
        end, position = start + values.numel(), 0
        for entry in entries:
            numel = entry.gradient.numel()
            first, last = max(start, position), min(end, position + numel)
            if first < last:
                yield (
                    values.narrow(0, first - start, last - first),
                    self._of(entry, values).narrow(0, first - position, last - first),
                )
            position += numel

    def _of(self, entry: Entry, like: torch.Tensor) -> torch.Tensor:
        numel = entry.gradient.numel()
        kept = self.tensors.get(entry.name)
        if kept is None or kept.numel() != numel:
            # A flat buffer of all parameters is padded for the number of ranks, which may have been another.
            renewed = like.new_zeros(numel)
            if kept is not None:
                both = min(numel, kept.numel())
                renewed.narrow(0, 0, both).copy_(kept.narrow(0, 0, both))
            self.tensors[entry.name] = kept = renewed
        return kept

    def load(
        self,
        read: Callable[[int], dict[str, torch.Tensor]],
        rank: int,
        world_size: int,
        saved_by: int,
        device: torch.device,
    ) -> None:
        """Take over what a checkpoint has, or nothing where it has nothing.

        Args:
            read: gives what a rank had left over when it was saved, by parameter.
            rank: this one.
            world_size: ranks that load.
            saved_by: ranks that saved.
            device: where gradients are.
        """
        if saved_by == world_size:
            self.tensors = {name: each.to(device) for name, each in read(rank).items()}
            return
        self.tensors = {}
        for each in range(saved_by):
            for name, tensor in read(each).items():
                # Of what ranks have on behalf of all, each will use its own part.
                share = tensor.to(device) / (1 if name.startswith(OF_SHARE) else world_size)
                self.tensors[name] = self.tensors[name] + share if name in self.tensors else share
