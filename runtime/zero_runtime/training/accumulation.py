"""Gradient accumulation: the window of micro-batches that make one training step."""

from __future__ import annotations

from zero_runtime.errors import UsageError


class Window:
    """A counter of micro-batches that identifies the last micro-batch of each step.

    Args:
        managed: Whether micro-batches are counted. Otherwise every call of ``step`` ends the window.
        steps: Whether there is an optimizer. Without an optimizer, backward passes are counted.

    Attributes:
        micro_steps: The number of micro-batches that ``step`` has counted over the whole training.
        passes: The number of backward passes since the last step.
        paused: Whether gradients only accumulate (``no_sync``, ``coalesce_grad_reduction``).
        stepping: Whether ``step`` is running.
    """

    def __init__(self, managed: bool, steps: bool) -> None:
        self.micro_steps = 0
        self.passes = 0
        self.paused = False
        self.stepping = False
        self._managed = managed
        self._steps = steps
        self._boundary: bool | None = None
        self._complete = False

    def is_last(self, size: int) -> bool:
        """Return whether the current micro-batch is the last of a window of ``size``."""
        if self._complete:
            return True
        if self._boundary is not None:
            return self._boundary
        if not self._managed:
            return self.stepping or not self._steps
        return (self.micro_steps + 1) % size == 0

    def say(self, is_last: bool) -> None:
        """Set whether the next micro-batch is the last one of its step. The setting replaces the count.

        Raises:
            UsageError: Micro-batches are not counted.
        """
        if not self._managed:
            raise UsageError(
                "set_gradient_accumulation_boundary was called with managed_gradient_accumulation false, where "
                "every step() is a boundary; remove the call"
            )
        self._boundary = is_last

    def complete(self) -> None:
        """Let the next ``step`` end the window at any count. All gradients of the step have been reduced."""
        self._complete = True

    def count_step(self, size: int) -> None:
        """Count a call of ``step``. If :meth:`complete` ended a window of ``size`` early, a new window begins."""
        self.micro_steps += 1
        if self._complete:
            self.micro_steps += -self.micro_steps % size
            self._complete = False

    def restart(self, micro_steps: int) -> None:
        """Continue from the count ``micro_steps``, with no accumulated gradients."""
        self.micro_steps = micro_steps
        self.passes = 0
        self._complete = False
