"""Delayed optimizer steps of an engine (``communication.bounded_delay``)."""

from __future__ import annotations

from collections.abc import Callable

from commprof import hooks
from zero_runtime import log
from zero_runtime.experimental.topology_aware.delay import DelayedGradients


class DelayedSteps:
    """The steps whose gradients are in flight; without a delay there are none.

    Args:
        gradients: the engine's; a delay makes them :class:`DelayedGradients`.
        global_rank: this process's rank; rank 0 warns.
    """

    def __init__(self, gradients: object, global_rank: int) -> None:
        self._gradients = gradients if isinstance(gradients, DelayedGradients) else None
        self._global_rank = global_rank

    @property
    def due(self) -> bool:
        """Whether there are reduced gradients for the next optimizer step; always without a delay."""
        return self._gradients is None or self._gradients.due

    def drain(self, take_step: Callable[[], object]) -> int:
        """Take all delayed steps, each by ``take_step()``, and return their number. All ranks must call it."""
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
        """Complete the messages of delayed steps, and warn that these steps are not taken, if there are any."""
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
