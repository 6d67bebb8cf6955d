"""Marks collectives of functions that write or read a checkpoint with that phase and purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commprof import hooks
from commprof.recorder.adapters.parts import Part
from commprof.recorder.training.training_loop import TrainingLoop
from commprof.schema import Phase, Purpose


class Checkpoints:
    """Wraps functions so that their collectives are for a checkpoint, unless an inner tag says otherwise.

    Args:
        loop: gets the phase.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop

    def part(self, module: str, path: str) -> Part:
        """One such function, which some versions of its framework lack."""
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
