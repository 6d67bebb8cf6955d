"""Assigns the checkpoint phase and purpose to collectives of functions that write or read a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commprof import hooks
from commprof.recorder.adapters.parts import Part
from commprof.recorder.training.training_loop import TrainingLoop
from commprof.schema import Phase, Purpose


class Checkpoints:
    """Wraps functions so that their collectives get the checkpoint purpose, unless an inner tag sets another purpose.

    Args:
        loop: The training loop that receives the phase.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop

    def part(self, module: str, path: str) -> Part:
        """Return a part for a function that writes or reads a checkpoint.

        The part is optional, because some versions of the framework lack the function.
        """
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
