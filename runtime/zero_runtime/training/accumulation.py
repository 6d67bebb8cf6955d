"""Gradient accumulation: the window of micro-batches that make one training step."""

from __future__ import annotations

from zero_runtime.errors import UsageError


class Window:
    """Counts micro-batches and tells which one is the last of its step.

    Args:
        managed: whether micro-batches are counted; otherwise every call of ``step`` ends the window.
        steps: whether there is an optimizer; without one, backward passes are counted.

    Attributes:
        micro_steps: micro-batches that ``step`` has counted, over the whole training.
        passes: backward passes since the last step.
        paused: gradients only accumulate (``no_sync``, ``coalesce_grad_reduction``).
        stepping: ``step`` is running.
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
        """Whether the current micro-batch is the last of a window of ``size``."""
        if self._complete:
            return True
        if self._boundary is not None:
            return self._boundary
        if not self._managed:
            return self.stepping or not self._steps
        return (self.micro_steps + 1) % size == 0

    def say(self, is_last: bool) -> None:
        """Set whether the next micro-batch is the last, instead of counting. Raises UsageError if nothing is counted."""
        if not self._managed:
            raise UsageError(
                "set_gradient_accumulation_boundary was called with managed_gradient_accumulation false, where "
                "every step() is a boundary; remove the call"
            )
        self._boundary = is_last

    def complete(self) -> None:
        """Let the next ``step`` end the window, whatever the count: all gradients of the step have been reduced."""
        self._complete = True

    def count_step(self, size: int) -> None:
        """Count a call of ``step``. A window of ``size`` that :meth:`complete` ended early is followed by a new one."""
        self.micro_steps += 1
        if self._complete:
            self.micro_steps += -self.micro_steps % size
            self._complete = False

    def restart(self, micro_steps: int) -> None:
        """Continue from ``micro_steps``, with nothing accumulated."""
        self.micro_steps = micro_steps
        self.passes = 0
        self._complete = False
