"""Delayed optimizer steps of the engine (``communication.bounded_delay``)."""

from __future__ import annotations

from typing import Any

import torch

from commprof import hooks
from zero_runtime import log
from zero_runtime.experimental.topology_aware.delay import DelayedGradients


class DelayedSteps:
    """The engine's methods for delayed steps. The attributes are the engine's."""

    optimizer: Any
    lr_scheduler: Any
    global_rank: int
    skipped_steps: int
    _gradients: Any

    @torch.no_grad()
    def drain_gradients(self) -> int:
        """Take the optimizer steps that ``communication.bounded_delay`` has delayed. All ranks must call it.

        Afterwards no gradient is in flight, and the next steps change no weights until the same delay has passed again. The
        learning-rate schedule advances; ``global_steps`` has counted these steps already. Gradients that have accumulated
        for an incomplete step stay.

        Returns:
            The number of delayed steps; 0 without a delay.
        """
        if not isinstance(self._gradients, DelayedGradients):
            return 0
        taken = 0
        hooks.phase("optimizer")
        for _ in self._gradients.outstanding():
            self._apply_due({})
            taken += 1
        hooks.phase("other")
        return taken

    def _apply_due(self, lr_kwargs: dict[str, Any]) -> bool:
        """Take a step by the available reduced gradients; False if there are none yet, or one overflowed."""
        if isinstance(self._gradients, DelayedGradients) and not self._gradients.due:
            return False
        self.optimizer.step()
        if getattr(self.optimizer, "overflow", False):
            self.skipped_steps += 1
            return False
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        return True

    def _give_up_put_off_steps(self) -> None:
        """Complete the messages of delayed steps, and warn that these steps are not taken, if there are any."""
        if not isinstance(self._gradients, DelayedGradients):
            return
        try:
            left = self._gradients.settle()
        except RuntimeError as error:
            log.warning(
                f"messages of communication.bounded_delay did not complete, since another rank has exited: {error}"
            )
            return
        if left and self.global_rank == 0:
            log.warning(
                f"the gradients of the last {left} steps were not applied (communication.bounded_delay); call "
                "engine.drain_gradients() on all ranks before the training ends"
            )
