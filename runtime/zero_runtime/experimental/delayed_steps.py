"""The engine's methods about optimizer steps that are taken late (``communication.bounded_delay``)."""

from __future__ import annotations

from typing import Any

import torch

from commprof import hooks
from zero_runtime import log
from zero_runtime.experimental.topology_aware.delay import DelayedGradients


class DelayedSteps:
    """Optimizer steps of an engine, whose attributes these are."""

    optimizer: Any
    lr_scheduler: Any
    global_rank: int
    skipped_steps: int
    _gradients: Any

    @torch.no_grad()
    def drain_gradients(self) -> int:
        """Take the optimizer steps that ``communication.bounded_delay`` has put off. All ranks must call it.

        Afterwards no gradient is under way, and the next steps change no weights until there are as many again. The
        schedule of the learning rate goes on; ``global_steps`` has counted these steps already. What has accumulated of
        a step that is not complete stays.

        Returns:
            How many steps were put off; 0 without a delay.
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
        """Take a step by the reduced gradients that are there; False where there are none yet, or one overflowed."""
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
        """Let the messages of steps that are put off end, and say that these are not taken, if there are any."""
        if not isinstance(self._gradients, DelayedGradients):
            return
        try:
            left = self._gradients.settle()
        except RuntimeError as error:
            log.warning(
                f"messages of communication.bounded_delay did not end, since another rank is gone: {error}"
            )
            return
        if left and self.global_rank == 0:
            log.warning(
                f"the gradients of the last {left} steps were not applied (communication.bounded_delay); call "
                "engine.drain_gradients() on all ranks before the training ends"
            )
