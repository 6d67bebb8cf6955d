"""The norm of the residuals after each step, and a warning when it grows without bound."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from commprof import hooks
from zero_runtime import log
from zero_runtime.experimental.compression.residuals import Residuals

# A norm that grows as the p-th power of the step is 2^p times its median. It grows as the first power at most while the
# residuals fill up, which takes about as many steps as one element waits to be sent.
FACTOR: Final = 4.0
STEPS: Final = 10
WINDOW: Final = 200


class ResidualWatch:
    """Publishes the metric ``residual_norm`` of this rank. Rank 0 warns once if its own grows.

    It warns when the norm has been more than :data:`FACTOR` times the median of the last :data:`WINDOW` steps in
    :data:`STEPS` successive steps.

    Args:
        residuals: this rank's residuals; None without any.
        global_rank: this process's rank.

    Attributes:
        norm: after the last step; None before the first, and without residuals.
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
                "lower the learning rate, set residual_decay below 1, or momentum_correction with SGD"
            )
