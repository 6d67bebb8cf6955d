"""What compression left out of the gradients of this rank, to be added to the next ones (error feedback).

What is kept of each parameter is a tensor as long as its gradient, without the loss scale. Gradients are divided for their
mean before they are compressed: the sum over the ranks is what the parameters have not got yet. What optimizers send as
signs is divided after it: there the mean over the ranks is.

A checkpoint keeps what each rank has. Where other ranks load it, or ranks that use other elements, all of it is added up and
shared out evenly; with its first bucket a rank takes those elements that it uses, for all that do not use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from zero_runtime.gradient_reduction.buckets import Entry

OF_SHARE: Final = (
    "share of "  # begins the name of what one rank alone has left over of an element, on behalf of all
)


PENDING: Final = (
    "pending "  # begins the name of what no rank has used yet since ranks of another layout saved it
)


class Layout(NamedTuple):
    """Which ranks use which elements.

    Attributes:
        places: every element is used by one of so many ranks; ranks of one host have different places.
        two_phases: one rank has what is left over of an element's sum.
    """

    places: int = 1
    two_phases: bool = False


class Residuals:
    """What this rank has left over, by parameter.

    Args:
        layout: which elements this rank uses, among others; default: all.
        of_mean: what is left over is divided by the number of ranks after it has been summed.

    Attributes:
        tensors: fp32, 1-D, by name; a parameter is in it from its first compressed gradient on.
    """

    def __init__(self, layout: Layout | None = None, *, of_mean: bool = False) -> None:
        self.layout = layout or Layout()
        self.tensors: dict[str, torch.Tensor] = {}
        self._of_mean = of_mean
        self._pending: dict[str, torch.Tensor] = {}  # an even share of what all ranks have

    def stored(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint keeps, by name."""
        return {**self.tensors, **{f"{PENDING}{name}": each for name, each in self._pending.items()}}

    def hand_over(self, values: torch.Tensor, entries: Sequence[Entry], scale: float) -> None:
        """Add all that is left over, times ``scale``, to ``values``, which hold ``entries`` and travel uncompressed.

        Values that are not finite are thrown away, so nothing is added to them.
        """
        left = any(entry.name in self._pending or entry.name in self.tensors for entry in entries)
        if not left or not bool(torch.isfinite(values).all()):
            return
        self._take(values, entries, 0)
        for target, residual in self._ranges_of(values, entries, 0):
            target.add_(residual, alpha=scale)
        for entry in entries:
            self.tensors.pop(entry.name, None)

    def add_to(self, values: torch.Tensor, entries: Sequence[Entry], start: int, scale: float) -> None:
        """Add what is left over, times ``scale``, to ``values``: elements ``start`` and up of a bucket of ``entries``."""
        self._take(values, entries, start)
        for target, residual in self._ranges_of(values, entries, start):
            target.add_(residual, alpha=scale)

    def keep(self, values: torch.Tensor, entries: Sequence[Entry], start: int, scale: float) -> None:
        """Keep ``values``, divided by ``scale``, in place of what was left over.

        Values that are not finite would never go away again: where there are some, all stays as it was.
        """
        if not bool(torch.isfinite(values).all()):
            return
        for source, residual in self._ranges_of(values, entries, start):
            torch.mul(source, 1.0 / scale, out=residual)

    def _take(self, values: torch.Tensor, entries: Sequence[Entry], start: int) -> None:
        """Make what is pending of ``entries`` this rank's own: the elements of ``values``. Others take the rest."""
        pending = [entry for entry in entries if entry.name in self._pending]
        if not pending:
            return
        shares = torch.cat([self._share_of(entry, values) for entry in entries])
        own = shares.narrow(0, start, max(0, min(values.numel(), shares.numel() - start)))
        for share, residual in self._ranges_of(own, entries, start):
            residual.add_(share, alpha=float(self.layout.places))
        for entry in pending:
            del self._pending[entry.name]

    def _share_of(self, entry: Entry, like: torch.Tensor) -> torch.Tensor:
        numel = entry.gradient.numel()
        share = self._pending.get(entry.name)
        return like.new_zeros(numel, dtype=torch.float32) if share is None else _of_length(share, numel)

    def _ranges_of(
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
        residual = self.tensors.get(entry.name)
        if residual is None:
            residual = like.new_zeros(numel, dtype=torch.float32)
        self.tensors[entry.name] = residual = _of_length(residual, numel)
        return residual

    def load(
        self,
        read: Callable[[int], dict[str, torch.Tensor]],
        rank: int,
        world_size: int,
        saved_by: int,
        layout: Layout | None,
        device: torch.device,
    ) -> None:
        """Take over what a checkpoint has, or nothing where it has nothing.

        Args:
            read: gives what a rank had left over when it was saved, by name.
            rank: this one.
            world_size: ranks that load.
            saved_by: ranks that saved.
            layout: of those; None where the checkpoint does not say, and is taken for that of these.
            device: where gradients are.
        """
        self.tensors, self._pending = {}, {}
        if saved_by == world_size and layout in (None, self.layout):
            for name, each in read(rank).items():
                kind = self._pending if name.startswith(PENDING) else self.tensors
                kind[name.removeprefix(PENDING)] = each.to(device)
            return
        for number in range(saved_by):
            for name, tensor in read(number).items():
                share = tensor.to(device) / (saved_by if self._of_mean else world_size)
                _add(self._pending, name.removeprefix(PENDING).removeprefix(OF_SHARE), share)


def _add(sums: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    """Add ``values`` to ``sums[name]``; the shorter of the two is filled up."""
    known = sums.get(name, values[:0])
    numel = max(values.numel(), known.numel())
    sums[name] = _of_length(known, numel) + _of_length(values, numel)


def _of_length(values: torch.Tensor, numel: int) -> torch.Tensor:
    """``values`` cut off or filled up: a flat buffer of all parameters is padded for the number of ranks."""
    if values.numel() == numel:
        return values
    renewed = values.new_zeros(numel)
    both = min(numel, values.numel())
    renewed.narrow(0, 0, both).copy_(values.narrow(0, 0, both))
    return renewed


def layout_of(saved: Mapping[str, object] | None) -> Layout | None:
    """The layout that a checkpoint tells of; None where it tells none."""
    if saved is None:
        return None
    places, two_phases = saved["places"], saved["two_phases"]
    if type(places) is not int or type(two_phases) is not bool:
        raise ValueError(f"its residuals are laid out as {dict(saved)!r}")
    return Layout(places, two_phases)
