"""Numbers of an engine's steps in a trace, unique across engines of the same process."""

from __future__ import annotations

from commprof import hooks


class StepNumbers:
    """Numbers the steps of one engine.

    Each engine counts from 0. If an engine is constructed after others have taken recorded steps, its steps could be
    mistaken for theirs. So they continue the numbering, unless their own count is higher anyway, as after
    ``load_checkpoint``. Engines that are constructed before the first step share the numbers, as they share the steps.

    Steps that an engine repeats after it has loaded an earlier checkpoint get new numbers too.
    """

    def __init__(self) -> None:
        self._after = hooks.position.step if hooks.has_stepped() else -1
        self._offset: int | None = None
        self._last = -1  # step of the engine's own count

    def of(self, global_step: int) -> int:
        """The number of step ``global_step`` of the engine."""
        if self._offset is None:
            self._offset = max(0, self._after + 1 - global_step)
        elif global_step < self._last:
            self._offset = hooks.position.step + 1 - global_step
        self._last = global_step
        return global_step + self._offset
