"""This rank's shard of every group of parameters (stages 1 to 3). The optimizer step reads and writes these shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

WHOLE = slice(None)


class OwnedShards:
    """The shards in memory, one for each group.

    In all methods, ``part`` is a Python slice of a shard's elements, with a step of 1.

    Attributes:
        own: For each group, the 1-D shard of this rank in the model's dtype.
    """

    own: list[torch.Tensor]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor of the shards and of the buffers that contain them, after all messages in flight."""
        yield from self.own

    def refresh(self) -> None:
        """Update the shards that are copies, after a script has changed the model's parameters."""

    def loaded(self) -> None:
        """Set the model's parameters as sharing the shards would set them, after a checkpoint is loaded."""

    def master(self, index: int, dtype: torch.dtype, part: slice = WHOLE) -> torch.Tensor:
        """Return the master of a part of shard ``index``.

        The master is a copy whose dtype is at least as wide as ``dtype``, or the shard itself if its dtype is
        wide enough.
        """
        own = self.own[index]
        return own.detach()[part].to(torch.promote_types(own.dtype, dtype)).requires_grad_()

    def is_master(self, index: int, dtype: torch.dtype) -> bool:
        """Return whether ``master`` returns the memory of shard ``index`` itself."""
        own = self.own[index]
        return torch.promote_types(own.dtype, dtype) is own.dtype

    def are_filed(self, index: int) -> bool:
        """Return whether a part of shard ``index`` is on NVMe, so that reading it takes time."""
        return False

    def begin_to_read(self, index: int, part: slice = WHOLE) -> None:
        """Start to read ``part`` of shard ``index``, if it is on NVMe."""

    def starts(self, index: int) -> Sequence[int] | None:
        """Return the elements of shard ``index`` at which a part may begin, in order. None means every element."""
        return None

    def read(self, index: int, target: torch.Tensor, part: slice = WHOLE) -> None:
        """Fill ``target`` with the values of ``part`` of shard ``index``. Both have the same length."""
        target.copy_(self.own[index][part])

    def write(self, index: int, master: torch.Tensor, part: slice = WHOLE) -> None:
        """Write the values of the updated ``master`` to ``part`` of shard ``index``."""
        own = self.own[index][part]
        if own.dtype is not master.dtype or own.data_ptr() != master.data_ptr():
            own.copy_(master)
