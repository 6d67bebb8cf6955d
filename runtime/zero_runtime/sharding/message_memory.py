"""Memory for the messages of blocks, which is reused from message to message on a CPU (stage 3).

The system allocates memory page by page, and clears and maps each page at its first access. For a message of
many MiB this takes as long as several copies of the message. The layers of a model have equal sizes, so the
buffers of one layer fit the next. On a GPU torch's allocator reuses memory in the same way.
"""

from __future__ import annotations

import torch


class MessageMemory:
    """Free buffers of one size, which is the size of the last buffer taken.

    Buffers of other sizes return to the allocator.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._kind: tuple[int, torch.dtype] | None = None  # elements and dtype of the last buffer taken

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a 1-D tensor of ``numel`` elements with undefined values."""
        if self._kind != (numel, dtype):
            self._free.clear()
            self._kind = numel, dtype
        return self._free.pop() if self._free else torch.empty(numel, dtype=dtype, device=device)

    def put(self, buffer: torch.Tensor) -> None:
        """Return ``buffer`` to the free buffers. It must no longer be read or written."""
        if buffer.device.type == "cpu" and self._kind == (buffer.numel(), buffer.dtype):
            self._free.append(buffer.view(-1))

    def give_back(self) -> None:
        """Return all free buffers to the allocator."""
        self._free.clear()
