"""Residuals: the part of this rank's gradients that compression left out, added to the next ones (error feedback).

The residual of each parameter has the length of its gradient, without the loss scale. Gradients are divided by the number of
ranks before compression, so the sum of the residuals over the ranks is what the parameters still lack. Values of 1-bit
optimizers are divided after it, so there the mean over the ranks is.

A checkpoint has the residuals of each rank. If it is loaded by another number of ranks, or by ranks that use other elements,
the residuals are summed and divided evenly. With its first bucket each rank takes the elements that it uses, on behalf of
the ranks that do not use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from zero_runtime.gradient_reduction.gradient_buckets import Entry

# The prefix of a residual that one rank has on behalf of all.
OF_SHARE: Final = "share of "


# The prefix of the momentum of a rank's own gradients, which is kept, saved and divided as residuals are.
OF_MOMENTUM: Final = "corrected momentum of "


# The prefix of a residual that was saved by ranks of another layout and has not been used yet.
PENDING: Final = "pending "


class Layout(NamedTuple):
    """Which ranks use which elements.

    Attributes:
        places: one of this many ranks uses each element; ranks of one host have different positions.
        two_phases: whether one rank has the residual of an element's sum.
    """

    places: int = 1
    two_phases: bool = False


class Residuals:
    """The residuals of this rank, by parameter.

    Args:
        layout: which elements this rank uses; default: all.
        of_mean: whether the sum of residuals is divided by the number of ranks.
        decay: factor of a residual each time it is added.
        momentum: whether the momentum of gradients is stored too; otherwise that of a checkpoint is not loaded.

    Attributes:
        tensors: fp32, 1-D, by name; a parameter is added with its first compressed gradient.
        step_of: by parameter the step in which its momentum was last multiplied by its factor; empty after a load.
    """

    def __init__(
        self,
        layout: Layout | None = None,
        *,
        of_mean: bool = False,
        decay: float = 1.0,
        momentum: bool = False,
    ) -> None:
        self.layout = layout or Layout()
        self._decay = decay
        self.tensors: dict[str, torch.Tensor] = {}
        self.step_of: dict[str, int] = {}
        self._of_mean = of_mean
        self._momentum = momentum
        self._pending: dict[str, torch.Tensor] = {}  # an even share of the residuals of all ranks

    def stored(self) -> dict[str, torch.Tensor]:
        """The residuals for a checkpoint, by name."""
        return {**self.tensors, **{f"{PENDING}{name}": each for name, each in self._pending.items()}}

    def hand_over(self, values: torch.Tensor, entries: Sequence[Entry], scale: float) -> None:
        """Add all residuals, times ``scale``, to ``values`` of ``entries``, which are sent uncompressed.

        Nothing is added to values that are not finite, since their step is skipped.
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
        """Add the residuals, times ``scale``, to ``values``: elements ``start`` and up of a bucket of ``entries``."""
        for target, residual in self.ranges(values, entries, start):
            target.add_(residual, alpha=scale * self._decay)

    def keep(self, values: torch.Tensor, entries: Sequence[Entry], start: int, scale: float) -> None:
        """Replace the residuals by ``values`` divided by ``scale``.

        If some values are not finite nothing changes: they would stay in the residuals forever.
        """
        if not bool(torch.isfinite(values).all()):
            return
        for source, residual in self._ranges_of(values, entries, start):
            torch.mul(source, 1.0 / scale, out=residual)

    def ranges(
        self, values: torch.Tensor, entries: Sequence[Entry], start: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The range of ``values`` of each of ``entries`` and its residual, which takes what is pending of it first."""
        self._take(values, entries, start)
        return self._ranges_of(values, entries, start)

    def norm(self) -> float:
        """The norm of this rank's residuals; 0 without any."""
        norms = [each.norm() for name, each in self.tensors.items() if not name.startswith(OF_MOMENTUM)]
        return float(torch.linalg.vector_norm(torch.stack(norms)).item()) if norms else 0.0

    def _take(self, values: torch.Tensor, entries: Sequence[Entry], start: int) -> None:
        """Take the pending residuals of ``entries`` for the elements of ``values``. Other ranks take the rest."""
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
        """The range of ``values`` of each parameter, and the residual of the same elements."""
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
        """Load the residuals of a checkpoint, if it has any.

        Args:
            read: returns the saved residuals of a rank, by name.
            rank: this rank.
            world_size: number of ranks that load.
            saved_by: number of ranks that saved.
            layout: of the ranks that saved; None if the checkpoint lacks it, which means an equal layout.
            device: of gradients.
        """
        self.tensors, self._pending, self.step_of = {}, {}, {}
        if saved_by == world_size and layout in (None, self.layout):
            for name, each in self._used(read(rank)):
                kind = self._pending if name.startswith(PENDING) else self.tensors
                kind[name.removeprefix(PENDING)] = each.to(device)
            return
        for number in range(saved_by):
            for name, tensor in self._used(read(number)):
                share = tensor.to(device) / (saved_by if self._of_mean else world_size)
                _add(self._pending, name.removeprefix(PENDING).removeprefix(OF_SHARE), share)

    def _used(self, saved: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in saved.items():
            if self._momentum or not name.removeprefix(PENDING).startswith(OF_MOMENTUM):
                yield name, each


def _add(sums: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    """Add ``values`` to ``sums[name]``; the shorter of the two is padded."""
    known = sums.get(name, values[:0])
    numel = max(values.numel(), known.numel())
    sums[name] = _of_length(known, numel) + _of_length(values, numel)


def _of_length(values: torch.Tensor, numel: int) -> torch.Tensor:
    """``values`` truncated or padded: the padding of a flat buffer depends on the number of ranks."""
    if values.numel() == numel:
        return values
    renewed = values.new_zeros(numel)
    both = min(numel, values.numel())
    renewed.narrow(0, 0, both).copy_(values.narrow(0, 0, both))
    return renewed


def layout_of(saved: Mapping[str, object] | None) -> Layout | None:
    """The layout in a checkpoint; None if it has none."""
    if saved is None:
        return None
    places, two_phases = saved["places"], saved["two_phases"]
    if type(places) is not int or type(two_phases) is not bool:
        raise ValueError(f"its residuals are laid out as {dict(saved)!r}")
    return Layout(places, two_phases)
