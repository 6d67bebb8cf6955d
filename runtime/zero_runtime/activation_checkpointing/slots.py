"""Buffers that are allocated once and store one checkpoint in each row (``contiguous_memory_optimization``)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero_runtime.errors import UsageError


class Kind(NamedTuple):
    """The key of a buffer: the position of an argument of checkpointed functions, and its size, dtype and device."""

    place: int
    numel: int
    dtype: torch.dtype
    device: torch.device


class Slot:
    """One row of a buffer. The row becomes free again when no reference to the slot is left.

    Attributes:
        row: The row, a 1-D tensor.
    """

    __slots__ = ("_free", "_number", "row")

    def __init__(self, row: torch.Tensor, number: int, free: list[int]) -> None:
        self.row = row
        self._number = number
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._number)


class Slots:
    """The buffers of this process.

    Args:
        count: The number of rows of each buffer.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._buffers: dict[Kind, tuple[torch.Tensor, list[int]]] = {}

    def take(self, kind: Kind) -> Slot:
        """Take a free row. The first call for each ``kind`` allocates the buffer.

        Raises:
            UsageError: No row is free.
        """
        if kind not in self._buffers:
            pinned = kind.device.type == "cpu" and torch.cuda.is_available()
            buffer = torch.empty(
                self._count, kind.numel, dtype=kind.dtype, device=kind.device, pin_memory=pinned
            )
            self._buffers[kind] = buffer, list(reversed(range(self._count)))
        buffer, free = self._buffers[kind]
        if not free:
            raise UsageError(
                f"activation_checkpointing.number_checkpoints is {self._count}, and more checkpoints than that are alive at "
                "once; set it to the number of checkpoint() calls before a backward pass, or call "
                "zero_runtime.checkpointing.reset() after forward passes without a backward pass"
            )
        number = free.pop()
        return Slot(buffer[number], number, free)

    def reset(self) -> None:
        """Drop the buffers, so that later calls allocate new ones. Existing checkpoints keep the old buffers."""
        self._buffers.clear()
