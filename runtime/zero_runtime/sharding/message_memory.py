"""Memory of the messages of blocks, used again from message to message on a CPU (stage 3).

The system hands out memory page by page, each cleared and mapped at its first access. For a message of many MiB that takes
as long as several copies of it. The layers of a model have equal sizes, so the buffers of one serve the next. On a GPU
torch's allocator does the same.
"""

from __future__ import annotations

import torch


class MessageMemory:
    """Free buffers of one size: that of the last one returned. Others go back to the allocator."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor of ``numel`` elements with undefined values."""
        if self._free and self._fits(self._free[-1], numel, dtype):
            return self._free.pop()
        return torch.empty(numel, dtype=dtype, device=device)

    def put(self, buffer: torch.Tensor) -> None:
        """Return ``buffer``, which nothing reads or writes any more."""
        if buffer.device.type != "cpu":
            return
        if self._free and not self._fits(self._free[-1], buffer.numel(), buffer.dtype):
            self._free.clear()
        self._free.append(buffer.view(-1))

    @staticmethod
    def _fits(free: torch.Tensor, numel: int, dtype: torch.dtype) -> bool:
        return free.numel() == numel and free.dtype is dtype
