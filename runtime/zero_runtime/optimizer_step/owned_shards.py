"""This rank's piece of every group of parameters, as the step over pieces reads and writes it (stages 1 to 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

WHOLE = slice(None)


class Pieces:
    """Pieces that are in memory, one for each group. A part of one is a slice of its elements, with a step of 1.

    Attributes:
        own: for each group, this rank's piece in the model's dtype, 1-D.
    """

    own: list[torch.Tensor]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the pieces, and of what they are parts of; nothing is under way to them any more."""
        yield from self.own

    def refresh(self) -> None:
        """A script has changed the model's parameters: bring pieces that are copies of them up to date."""

    def loaded(self) -> None:
        """The model's parameters have been read from a checkpoint: make them what sharing the pieces makes of them."""

    def master(self, index: int, dtype: torch.dtype, part: slice = WHOLE) -> torch.Tensor:
        """What the optimizer updates in place of a part of piece ``index``: a copy of at least ``dtype``, or itself."""
        own = self.own[index]
        return own.detach()[part].to(torch.promote_types(own.dtype, dtype)).requires_grad_()

    def is_master(self, index: int, dtype: torch.dtype) -> bool:
        """Whether ``master`` gives the memory of piece ``index`` itself."""
        own = self.own[index]
        return torch.promote_types(own.dtype, dtype) is own.dtype

    def are_filed(self, index: int) -> bool:
        """Whether a part of piece ``index`` is in files, so that reading it takes time."""
        return False

    def begin_to_read(self, index: int, part: slice = WHOLE) -> None:
        """That part of piece ``index`` is read next: begin to, where it is in files."""

    def starts(self, index: int) -> Sequence[int] | None:
        """The elements of piece ``index`` at which a part may begin, in order; None where it may anywhere."""
        return None

    def read(self, index: int, target: torch.Tensor, part: slice = WHOLE) -> None:
        """Fill ``target``, which is as long as the ``part`` of piece ``index``, with its values."""
        target.copy_(self.own[index][part])

    def write(self, index: int, master: torch.Tensor, part: slice = WHOLE) -> None:
        """Make the values of ``master``, which has been updated, those of that ``part`` of piece ``index``."""
        own = self.own[index][part]
        if own.dtype is not master.dtype or own.data_ptr() != master.data_ptr():
            own.copy_(master)
