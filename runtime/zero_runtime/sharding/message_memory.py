"""Memory of the messages of blocks, used again from message to message on a CPU (stage 3).

The system hands out memory page by page, each cleared and mapped at its first access. For a message of many MiB that takes
as long as several copies of it. The layers of a model have equal sizes, so the buffers of one serve the next. On a GPU
torch's allocator does the same.
"""

from __future__ import annotations

import torch


class MessageMemory:
    """Free buffers of one size, that of the last one taken. Others go back to the allocator."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._kind: tuple[int, torch.dtype] | None = None  # elements and dtype of the last buffer taken

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor of ``numel`` elements with undefined values."""
        if self._kind != (numel, dtype):
            self._free.clear()
            self._kind = numel, dtype
        return self._free.pop() if self._free else torch.empty(numel, dtype=dtype, device=device)

    def put(self, buffer: torch.Tensor) -> None:
        """Return ``buffer``, which nothing reads or writes any more."""
        if buffer.device.type == "cpu" and self._kind == (buffer.numel(), buffer.dtype):
            self._free.append(buffer.view(-1))

    def give_back(self) -> None:
        """Return all free buffers to the allocator."""
        self._free.clear()
