"""This rank's shard of every group of parameters, as the optimizer step reads and writes it (stages 1 to 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

WHOLE = slice(None)


class OwnedShards:
    """Shards in memory, one for each group. A ``part`` is a Python slice of a shard's elements, with a step of 1.

    Attributes:
        own: for each group, this rank's shard in the model's dtype, 1-D.
    """

    own: list[torch.Tensor]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the shards and of the buffers that contain them, after all messages in flight."""
        yield from self.own

    def refresh(self) -> None:
        """Update shards that are copies, after a script has changed the model's parameters."""

    def loaded(self) -> None:
        """Set the model's parameters as sharing the shards would, after a checkpoint has been loaded."""

    def master(self, index: int, dtype: torch.dtype, part: slice = WHOLE) -> torch.Tensor:
        """The master of a part of shard ``index``: a copy of at least ``dtype``, or the shard itself."""
        own = self.own[index]
        return own.detach()[part].to(torch.promote_types(own.dtype, dtype)).requires_grad_()

    def is_master(self, index: int, dtype: torch.dtype) -> bool:
        """Whether ``master`` returns the memory of shard ``index`` itself."""
        own = self.own[index]
        return torch.promote_types(own.dtype, dtype) is own.dtype

    def are_filed(self, index: int) -> bool:
        """Whether a part of shard ``index`` is on NVMe, so that reading it takes time."""
        return False

    def begin_to_read(self, index: int, part: slice = WHOLE) -> None:
        """Start to read that part of shard ``index``, if it is on NVMe."""

    def starts(self, index: int) -> Sequence[int] | None:
        """The elements of shard ``index`` at which a part may begin, in order; None for all elements."""
        return None

    def read(self, index: int, target: torch.Tensor, part: slice = WHOLE) -> None:
        """Fill ``target`` with the values of ``part`` of shard ``index``, which has the same length."""
        target.copy_(self.own[index][part])

    def write(self, index: int, master: torch.Tensor, part: slice = WHOLE) -> None:
        """Write the values of the updated ``master`` to ``part`` of shard ``index``."""
        own = self.own[index][part]
        if own.dtype is not master.dtype or own.data_ptr() != master.data_ptr():
            own.copy_(master)
