"""Schedules that raise the learning rate first: DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR.

During n warm-up steps, the rate has covered a fraction of the way from the minimum to the maximum. After step t, this
fraction is log(t + 1) / log(n), or t / n with ``warmup_type`` linear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from zero_runtime.errors import ConfigError
from zero_runtime.schedules.iterations import IterationSchedule, for_each_group, whole_number

_TYPES: Final = ("log", "linear")


class _Warmup(IterationSchedule):
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_type not in _TYPES:
            raise ConfigError(
                f"scheduler.params.warmup_type is {warmup_type!r}; expected one of: {', '.join(_TYPES)}"
            )
        self.warmup_num_steps = max(2, whole_number("warmup_num_steps", warmup_num_steps, 1))
        self.warmup_type = warmup_type

    @property
    def _warming(self) -> bool:
        return self.last_batch_iteration < self.warmup_num_steps

    def _warmed(self) -> float:
        done = self.last_batch_iteration
        if self.warmup_type == "log":
            return math.log(done + 1) / math.log(self.warmup_num_steps)
        return done / self.warmup_num_steps


class WarmupLR(_Warmup):
    """A schedule that raises the learning rate of each param group from a minimum to a maximum, then keeps the maximum.

    Args:
        optimizer: The optimizer whose ``lr`` is set.
        warmup_min_lr: The minimum: one value for all param groups, or one for each.
        warmup_max_lr: The maximum, in the same form; None for the optimizer's own learning rates.
        warmup_num_steps: The number of warm-up steps, at least 1. The value 1 has the same effect as 2.
        warmup_type: ``log`` or ``linear``.
        last_batch_iteration: The number of steps already taken, minus one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        current = self.get_last_lr()
        self.min_lrs = for_each_group("warmup_min_lr", warmup_min_lr, len(current))
        self.max_lrs = (
            current if warmup_max_lr is None else for_each_group("warmup_max_lr", warmup_max_lr, len(current))
        )
        if last_batch_iteration == -1:
            self._apply()

    def get_lr(self) -> list[float]:
        """Return the current learning rate of each param group."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        fraction = self._warmed() if self._warming else self._after()
        return [low + (high - low) * fraction for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after(self) -> float:
        """Return the fraction of the way from the minimum to the maximum after the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """A schedule with the warm-up of WarmupLR, after which the rate falls linearly to the minimum.

    The rate reaches the minimum at step ``total_num_steps``.

    Args:
        optimizer: The optimizer whose ``lr`` is set.
        total_num_steps: The number of steps of the whole training.
        warmup_min_lr: The minimum: one value for all param groups, or one for each.
        warmup_max_lr: The maximum, in the same form; None for the optimizer's own learning rates.
        warmup_num_steps: The number of warm-up steps, at least 1. The value 1 has the same effect as 2.
        warmup_type: ``log`` or ``linear``.
        last_batch_iteration: The number of steps already taken, minus one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = whole_number("total_num_steps", total_num_steps, 1)
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def _after(self) -> float:
        remaining = self.total_num_steps - self.last_batch_iteration
        return max(0.0, remaining / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """A schedule that multiplies each param group's own learning rate by a ratio.

    The ratio rises to 1 during the warm-up, then falls along half a cosine.

    Args:
        optimizer: The optimizer whose ``lr`` is set.
        total_num_steps: The number of steps of the whole training.
        warmup_min_ratio: The ratio at the start of the warm-up. Before the first step, the rate is always 0.
        warmup_num_steps: The number of warm-up steps, at least 1. The value 1 has the same effect as 2.
        cos_min_ratio: The ratio from step ``total_num_steps`` on.
        warmup_type: ``log`` or ``linear``.
        last_batch_iteration: The number of steps already taken, minus one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = whole_number("total_num_steps", total_num_steps, 1)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = self.get_last_lr()
        if last_batch_iteration == -1:
            self._apply()

    def get_lr_ratio(self) -> float:
        """Return the current factor of the param groups' own learning rates."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self._warming:
            return self.warmup_min_ratio + self._warmed() * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def get_lr(self) -> list[float]:
        """Return the current learning rate of each param group."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]
