"""The numbers of an engine's steps in a trace, where they come after those of engines before it."""

from __future__ import annotations

from commprof import hooks


class StepNumbers:
    """Numbers the steps of one engine.

    An engine that is made within a recorded run, when others have taken steps of it already, counts from 0 again: its
    steps would be taken for theirs. So they are numbered on from there, unless they come later anyway, as after
    ``load_checkpoint``. Engines that are made before the first step share its numbers, as they share the steps.

    The same holds for steps that an engine repeats after it has loaded an earlier checkpoint.
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
