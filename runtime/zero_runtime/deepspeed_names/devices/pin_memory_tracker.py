"""``deepspeed.utils.pin_memory_tracker``: the sum of the page-locked memory that a script reports."""

from __future__ import annotations

from typing import Final

from zero_runtime.deepspeed_names.ranks.logging_names import logger

_GIB: Final = 2**30
_FIRST_LINE: Final = 32 * _GIB  # a line is logged at this size, and at each doubling


def shown_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text, in the largest unit that is not larger than the number.

    The names of the units and the number of digits are those of DeepSpeed.
    """
    for unit, size, digits in (("GB", _GIB, 3), ("MB", 2**20, 2), ("KB", 2**10, 1)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes} B"


class PinnedMemoryTracker:
    """The sum of the page-locked memory of a process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set the sum to 0."""
        self._bytes = self._calls = 0
        self._next_checkpoint = _FIRST_LINE

    def track(self, num_bytes: int) -> None:
        """Add ``num_bytes`` to the sum, and log a line for each threshold that the sum reaches."""
        self._bytes += num_bytes
        self._calls += 1
        while self._bytes >= self._next_checkpoint:
            logger.info(
                f"[pinned-memory checkpoint] crossed {shown_bytes(self._next_checkpoint)}: {self._sum()}"
            )
            self._next_checkpoint *= 2

    def log_summary(self, tag: str = "") -> None:
        """Log the sum."""
        logger.info(f"[pinned-memory{f' {tag}' if tag else ''}] {self._sum()}")

    def _sum(self) -> str:
        return f"{shown_bytes(self._bytes)} pinned across {self._calls} allocations"


tracker: Final = PinnedMemoryTracker()


def track_pinned_memory(num_bytes: int) -> None:
    """Add ``num_bytes`` to the sum of this process."""
    tracker.track(num_bytes)


def pinned_memory_summary(tag: str = "") -> None:
    """Log the sum of this process."""
    tracker.log_summary(tag)
