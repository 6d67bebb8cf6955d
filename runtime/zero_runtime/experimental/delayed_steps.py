"""Delayed optimizer steps of an engine (``communication.bounded_delay``)."""

from __future__ import annotations

from collections.abc import Callable

from commprof import hooks
from zero_runtime import log
from zero_runtime.experimental.topology_aware.delay import DelayedGradients


class DelayedSteps:
    """The optimizer steps whose gradients are in flight. Without a delay there are no such steps.

    Args:
        gradients: The gradients of the engine. With a delay they are :class:`DelayedGradients`.
        global_rank: This process's rank. Only rank 0 warns.
    """

    def __init__(self, gradients: object, global_rank: int) -> None:
        self._gradients = gradients if isinstance(gradients, DelayedGradients) else None
        self._global_rank = global_rank

    @property
    def due(self) -> bool:
        """Whether there are reduced gradients for the next optimizer step. Without a delay this is always true."""
        return self._gradients is None or self._gradients.due

    def drain(self, take_step: Callable[[], object]) -> int:
        """Call ``take_step()`` for each delayed step, and return the number of these steps.

        All ranks must call this method.
        """
        if self._gradients is None:
            return 0
        taken = 0
        hooks.phase("optimizer")
        for _ in self._gradients.outstanding():
            take_step()
            taken += 1
        hooks.phase("other")
        return taken

    def give_up(self) -> None:
        """Complete the messages of delayed steps, and warn if there are steps that are not taken."""
        if self._gradients is None:
            return
        try:
            left = self._gradients.settle()
        except RuntimeError as error:
            log.warning(
                f"messages of communication.bounded_delay did not complete, since another rank has exited: {error}"
            )
            return
        if left and self._global_rank == 0:
            log.warning(
                f"the gradients of the last {left} steps were not applied (communication.bounded_delay); call "
                "engine.drain_gradients() on all ranks before the training ends"
            )
