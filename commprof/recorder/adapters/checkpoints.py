"""Functions that write or read a checkpoint: phase and purpose of what they issue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commprof import hooks
from commprof.recorder.adapters.parts import Part
from commprof.recorder.training.training_loop import TrainingLoop
from commprof.schema import Phase, Purpose


class Checkpoints:
    """Says of functions that all they issue is for a checkpoint, unless something within says more.

    Args:
        loop: is told of the phase.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop

    def part(self, module: str, path: str) -> Part:
        """One such function, which some versions of its framework do without."""
        return Part(module, path, self._wrap, True)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tag = hooks.tag(Purpose.CHECKPOINT.value)

        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            if self._loop.is_beside_training():
                with tag:
                    return original(*args, **kwargs)
            before = self._loop.enter(Phase.CHECKPOINT)
            try:
                with tag:
                    return original(*args, **kwargs)
            finally:
                self._loop.leave(before)

        return checkpoint
