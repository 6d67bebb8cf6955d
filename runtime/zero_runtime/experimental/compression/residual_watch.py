"""The norm of the residuals after each step, with a warning if the norm grows without bound."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from commprof import hooks
from zero_runtime import log
from zero_runtime.experimental.compression.residuals import Residuals

# A norm that grows with the p-th power of the step is 2^p times its median. While the residuals fill up, the
# norm grows at most with the first power. They fill up in about as many steps as one element waits to be sent.
FACTOR: Final = 4.0
STEPS: Final = 10
WINDOW: Final = 200


class ResidualWatch:
    """A monitor that publishes the metric ``residual_norm`` of this rank. Rank 0 warns once if its norm grows.

    The warning is logged if the norm exceeds :data:`FACTOR` times the median of the last :data:`WINDOW` steps
    in :data:`STEPS` successive steps.

    Args:
        residuals: This rank's residuals, or None without residuals.
        global_rank: This process's rank.

    Attributes:
        norm: The norm after the last step. None before the first step, and without residuals.
    """

    def __init__(self, residuals: Residuals | None, global_rank: int) -> None:
        self._residuals = residuals
        self._warns = global_rank == 0
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._above = 0
        self.norm: float | None = None

    def see_step(self, step: int) -> None:
        """Measure the residuals after step ``step``."""
        if self._residuals is None or not self._residuals.tensors:
            return
        self.norm = self._residuals.norm()
        hooks.metric("residual_norm", self.norm)
        self._norms.append(self.norm)
        usual = median(self._norms)
        self._above = self._above + 1 if self.norm > FACTOR * usual > 0 else 0
        if self._warns and self._above >= STEPS:
            self._warns = False
            log.warning(
                f"gradient_compression: the norm of the residual of rank 0 grows: {self.norm:.3g} at step {step}, more "
                f"than {FACTOR:g} times its median of {usual:.3g} in {STEPS} successive steps, so the training may diverge; "
                "lower the learning rate, set residual_decay below 1, or with SGD set momentum_correction"
            )
