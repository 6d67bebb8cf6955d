"""Parameters as views of flat buffers, whole on every rank (stages 1 and 2).

What an optimizer over pieces needs of the parameters, here and in :mod:`zero_runtime.sharded_parameters`: ``own``, this
rank's piece of every group in the model's dtype; ``begin_step`` before the pieces are written; ``share`` after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.gradients import ParameterGroup

_GATHER: Final = hooks.tag("parameter_gather")


class FlatParameters:
    """Makes the parameters of each group views of one flat buffer, of which this rank updates a piece.

    Args:
        groups: the trainable parameters.
        group: the data-parallel ranks.
        by_broadcast: share the pieces by one broadcast each, instead of by an all_gather.
        bucket: elements of the largest message of such an all_gather; None sends each group at once.

    Attributes:
        own: for each group, this rank's piece of the flat buffer, 1-D: a part of it, or where it has several bands a
            copy of this rank's rows.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        group: DataParallelGroup,
        by_broadcast: bool = False,
        bucket: int | None = None,
    ) -> None:
        self._group = group
        self._by_broadcast = by_broadcast
        self._bucket = bucket
        self._flat = [flatten(each) for each in groups]
        self._bands = [
            band
            for flat, each in zip(self._flat, groups, strict=True)
            for band in flat.chunk(each.flat_layout.bands)
        ]
        self._rows = [
            flat.view(each.flat_layout.bands, group.world_size, -1).select(1, group.rank)
            for flat, each in zip(self._flat, groups, strict=True)
        ]
        self.own = [rows.reshape(-1) for rows in self._rows]

    def begin_step(self) -> None:
        """Nothing to do: the pieces are part of what the model uses."""

    def share(self) -> None:
        """Send this rank's pieces to the others, and get theirs."""
        for own, rows in zip(self.own, self._rows, strict=True):
            if len(rows) > 1:
                rows.copy_(own.view_as(rows))
        if self._group.world_size == 1:
            return
        if self._by_broadcast or self._bucket is not None or len(self._bands) == len(self._flat):
            for band in self._bands:
                self._share(band)
            return
        # Several at once keep the wire busy while one of them begins or ends.
        works = [self._group.start_all_gather(band, self._row(band), why=_GATHER) for band in self._bands]
        for work in works:
            work.wait()

    def _row(self, band: torch.Tensor) -> torch.Tensor:
        return band.chunk(self._group.world_size)[self._group.rank]

    def _share(self, band: torch.Tensor) -> None:
        if self._by_broadcast:
            for owner, piece in enumerate(band.chunk(self._group.world_size)):
                self._group.broadcast(piece, owner, why=_GATHER)
        elif self._bucket is not None:
            self._gather_in_parts(band, self._bucket)
        else:
            self._group.all_gather_single(band, self._row(band), why=_GATHER)

    def _gather_in_parts(self, band: torch.Tensor, limit: int) -> None:
        """Gather ``band`` in messages of at most ``limit`` elements; each part of a row begins at an even element."""
        rows = band.chunk(self._group.world_size)
        width = max(2, limit // self._group.world_size // 2 * 2)
        for begin in range(0, rows[0].numel(), width):
            numel = min(width, rows[0].numel() - begin)
            parts = [row.narrow(0, begin, numel) for row in rows]
            self._group.all_gather(parts, parts[self._group.rank], why=_GATHER)


def flatten(each: ParameterGroup) -> torch.Tensor:
    """Lay the parameters of a group end to end in one new flat buffer, and make them views of it."""
    first, layout = each.parameters[0], each.flat_layout
    flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
    for parameter, offset in zip(each.parameters, layout.offsets, strict=True):
        view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return flat
