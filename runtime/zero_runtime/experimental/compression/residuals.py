"""Residuals, the part of this rank's gradients that compression left out (error feedback).

The residual is added to the next gradient. The residual of a parameter has the length of the parameter's
gradient, and does not include the loss scale.

Gradients are divided by the number of ranks before compression. So the sum of the residuals over the ranks is
the update that the parameters have not received yet. Values of 1-bit optimizers are divided after
compression. For them, this update is the mean of the residuals over the ranks.

A checkpoint contains the residuals of each rank. If a different number of ranks loads the checkpoint, or the
ranks use different elements, the residuals are summed and divided evenly. With its first bucket, each rank
then takes the elements that it uses, also on behalf of the ranks that do not use these elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from zero_runtime.gradient_reduction.gradient_buckets import Entry

# The prefix of the residual of a sum, which one rank stores on behalf of all ranks.
OF_SHARE: Final = "share of "


# The prefix of the momentum of a rank's own gradients, which is stored, saved and divided like residuals.
OF_MOMENTUM: Final = "corrected momentum of "


# The prefix of a residual that was saved with a different layout of ranks and has not been used yet.
PENDING: Final = "pending "


class Layout(NamedTuple):
    """The assignment of elements to the ranks that use them.

    Attributes:
        places: The number of different positions of ranks. The ranks of one host have different positions,
            and exactly one position uses each element.
        two_phases: Whether one rank stores the residual of the sum of each element.
    """

    places: int = 1
    two_phases: bool = False


class Residuals:
    """The residuals of this rank, by parameter.

    Args:
        layout: The elements that this rank uses. The default is all elements.
        of_mean: Whether the sum of the residuals is divided by the number of ranks.
        decay: The factor by which a residual is multiplied each time it is added.
        momentum: Whether the momentum of gradients is stored too. If not, the momentum in a checkpoint is not
            loaded.

    Attributes:
        tensors: The residuals (fp32, 1-D) by parameter name. A parameter is added with its first compressed
            gradient.
        step_of: For each parameter, the step in which its momentum was last multiplied by the momentum
            factor. Empty after a load.
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
        """Return the residuals for a checkpoint, by name."""
        return {**self.tensors, **{f"{PENDING}{name}": each for name, each in self._pending.items()}}

    def hand_over(self, values: torch.Tensor, entries: Sequence[Entry], scale: float) -> None:
        """Add all residuals, times ``scale``, to the ``values`` of ``entries``, and drop these residuals.

        The values are sent uncompressed. Nothing is added to values that are not finite, because their step
        is skipped.
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
        """Add the residuals, times ``scale`` and the decay factor, to ``values``.

        ``values`` are the elements from the position ``start`` of a bucket of ``entries``.
        """
        for target, residual in self.ranges(values, entries, start):
            target.add_(residual, alpha=scale * self._decay)

    def keep(self, values: torch.Tensor, entries: Sequence[Entry], start: int, scale: float) -> None:
        """Replace the residuals by ``values`` divided by ``scale``.

        If some values are not finite, nothing changes. Such values would stay in the residuals forever.
        """
        if not bool(torch.isfinite(values).all()):
            return
        for source, residual in self._ranges_of(values, entries, start):
            torch.mul(source, 1.0 / scale, out=residual)

    def ranges(
        self, values: torch.Tensor, entries: Sequence[Entry], start: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each of ``entries``, its range in ``values`` and its residual.

        Pending residuals of the entries are first added to their residuals.
        """
        self._take(values, entries, start)
        return self._ranges_of(values, entries, start)

    def norm(self) -> float:
        """Return the norm of this rank's residuals, or 0 without residuals."""
        norms = [each.norm() for name, each in self.tensors.items() if not name.startswith(OF_MOMENTUM)]
        return float(torch.linalg.vector_norm(torch.stack(norms)).item()) if norms else 0.0

    def _take(self, values: torch.Tensor, entries: Sequence[Entry], start: int) -> None:
        """Add the pending residuals of ``entries`` for the elements of ``values``.

        Other ranks add the pending residuals of the other elements.
        """
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
        """Yield the range of ``values`` of each parameter, and the residual of the same elements."""
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
            read: A function that returns the saved residuals of a rank, by name.
            rank: The number of this rank.
            world_size: The number of ranks that load.
            saved_by: The number of ranks that saved.
            layout: The layout of the ranks that saved. None if the checkpoint contains no layout, which means
                that the layouts are equal.
            device: The device of the gradients.
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
    """Add ``values`` to ``sums[name]``. The shorter of the two tensors is padded."""
    known = sums.get(name, values[:0])
    numel = max(values.numel(), known.numel())
    sums[name] = _of_length(known, numel) + _of_length(values, numel)


def _of_length(values: torch.Tensor, numel: int) -> torch.Tensor:
    """Return ``values`` truncated or padded to ``numel`` elements.

    The length differs because the padding of a flat buffer depends on the number of ranks.
    """
    if values.numel() == numel:
        return values
    renewed = values.new_zeros(numel)
    both = min(numel, values.numel())
    renewed.narrow(0, 0, both).copy_(values.narrow(0, 0, both))
    return renewed


def layout_of(saved: Mapping[str, object] | None) -> Layout | None:
    """Return the layout in a checkpoint, or None if the checkpoint contains no layout."""
    if saved is None:
        return None
    places, two_phases = saved["places"], saved["two_phases"]
    if type(places) is not int or type(two_phases) is not bool:
        raise ValueError(f"its residuals are laid out as {dict(saved)!r}")
    return Layout(places, two_phases)
