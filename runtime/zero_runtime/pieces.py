"""This rank's piece of every group of parameters, as the step over pieces reads and writes it (stages 1 to 3)."""

from __future__ import annotations

import torch


class Pieces:
    """Pieces that are in memory, one for each group.

    Attributes:
        own: for each group, this rank's piece in the model's dtype, 1-D.
    """

    own: list[torch.Tensor]

    def master(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """What the optimizer updates in place of piece ``index``: a copy of at least ``dtype``, or itself if it is that."""
        own = self.own[index]
        return own.detach().to(torch.promote_types(own.dtype, dtype)).requires_grad_()

    def read(self, index: int, target: torch.Tensor, part: slice = slice(None)) -> None:
        """Fill that ``part`` of ``target``, which is as long as piece ``index``, with the piece's values."""
        target[part] = self.own[index][part]

    def write(self, index: int, master: torch.Tensor) -> None:
        """Make the values of ``master``, which has been updated, those of piece ``index``."""
        own = self.own[index]
        if own.dtype is not master.dtype or own.data_ptr() != master.data_ptr():
            own.copy_(master)
