"""Schedules that raise the learning rate first: DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR.

Over n warm-up steps the fraction of the way after step t is log(t + 1) / log(n), or t / n with ``warmup_type`` linear.
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
    """Raises the learning rate of each param group from a minimum to a maximum, then keeps it.

    Args:
        optimizer: whose ``lr`` is set.
        warmup_min_lr: for all groups, or one for each.
        warmup_max_lr: likewise; None takes the optimizer's learning rates.
        warmup_num_steps: at least 1; 1 counts as 2.
        warmup_type: log or linear.
        last_batch_iteration: steps already taken, minus one.
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
        """The learning rate of each param group now."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        fraction = self._warmed() if self._warming else self._after()
        return [low + (high - low) * fraction for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after(self) -> float:
        """The fraction of the way after the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As WarmupLR; after the warm-up the rate falls in a straight line, to the minimum at ``total_num_steps``.

    Args:
        optimizer: whose ``lr`` is set.
        total_num_steps: steps of the whole training.
        warmup_min_lr: for all groups, or one for each.
        warmup_max_lr: likewise.
        warmup_num_steps: at least 1; 1 counts as 2.
        warmup_type: log or linear.
        last_batch_iteration: steps already taken, minus one.
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
    """Multiplies each group's own learning rate by a ratio that rises to 1, then falls along half a cosine.

    Args:
        optimizer: whose ``lr`` is set.
        total_num_steps: steps of the whole training.
        warmup_min_ratio: the ratio that the warm-up begins at; before the first step the rate is 0 all the same.
        warmup_num_steps: at least 1; 1 counts as 2.
        cos_min_ratio: the ratio from ``total_num_steps`` on.
        warmup_type: log or linear.
        last_batch_iteration: steps already taken, minus one.
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
        """The current factor of the groups' own learning rates."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self._warming:
            return self.warmup_min_ratio + self._warmed() * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group now."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]
