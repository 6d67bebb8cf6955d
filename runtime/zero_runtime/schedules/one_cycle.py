"""DeepSpeed's OneCycle: the learning rate rises and falls once, the momentum falls and rises, then both decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from zero_runtime import comm, log
from zero_runtime.schedules.iterations import IterationSchedule, at_least, for_each_group, whole_number

_SECOND_BETA: Final = 0.99


class Cycle(NamedTuple):
    """The shape of the cycle. Sizes are numbers of optimizer steps.

    Attributes:
        first, second: The sizes of the two halves.
        first_stairs, second_stairs: The number of stairs in each half. With 0, the half is continuous.
        decay: The size of an interval of the decay that follows the cycle; 0 for no decay.
    """

    first: float
    second: float
    first_stairs: int
    second_stairs: int
    decay: float

    @property
    def size(self) -> float:
        """The number of steps in the cycle."""
        return self.first + self.second

    def height(self, done: int) -> float:
        """Return the height of the cycle after ``done`` steps: 0 at both ends, 1 at the peak."""
        place = 1.0 + done / self.size - math.floor(1 + done / self.size)
        peak = self.first / self.size
        rising = place <= peak
        stairs = self.first_stairs if rising else self.second_stairs
        if not stairs:
            return place / peak if rising else (place - 1) / (peak - 1)
        # The stair is computed from the number of steps, because a rounded height just below a stair would give a stair
        # that is one too low.
        step = done % self.size
        if step <= self.first:
            return math.floor(step * stairs / self.first) / stairs
        return math.floor((self.size - step) * stairs / self.second) / stairs


class OneCycle(IterationSchedule):
    """A schedule that cycles the learning rate once between two bounds, and Adam's first beta inversely.

    After the cycle, both decay. The method is described in Smith, "A disciplined approach to neural network
    hyper-parameters: Part 1" (arXiv:1803.09820). A bound is one value for all param groups, or one value for
    each. If the optimizer has no betas, the momentum is not cycled.

    Args:
        optimizer: The optimizer whose ``lr`` and ``betas`` are set. The second beta becomes 0.99.
        cycle_min_lr: The learning rate at both ends of the cycle.
        cycle_max_lr: The learning rate at the peak of the cycle.
        decay_lr_rate: The rate of the decay of the learning rate. After the cycle, ``cycle_min_lr`` is divided by
            1 + rate * intervals.
        cycle_first_step_size: The number of steps of the rising half.
        cycle_second_step_size: The number of steps of the falling half; None for the number of the rising half.
        cycle_first_stair_count: The number of stairs of the rising half; 0 for none.
        cycle_second_stair_count: The number of stairs of the falling half; None for the number of the rising half.
        decay_step_size: The number of steps in an interval of the decay; 0 for no decay.
        cycle_momentum: Whether the momentum is cycled.
        cycle_min_mom: The momentum at the peak.
        cycle_max_mom: The momentum at both ends.
        decay_mom_rate: The rate of the change of the momentum. After the cycle, ``cycle_max_mom`` is multiplied by
            1 + rate * intervals.
        last_batch_iteration: The number of steps already taken, minus one.
    """

    def __init__(  # noqa: PLR0913 - the arguments are DeepSpeed's
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        first = at_least("cycle_first_step_size", cycle_first_step_size, 0, exclusive=True)
        second = first if cycle_second_step_size is None else cycle_second_step_size
        stairs = whole_number("cycle_first_stair_count", cycle_first_stair_count, 0)
        falling = stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.cycle = Cycle(
            first,
            at_least("cycle_second_step_size", second, 0),
            stairs,
            whole_number("cycle_second_stair_count", falling, 0),
            at_least("decay_step_size", decay_step_size, 0),
        )
        count = len(optimizer.param_groups)
        self.min_lrs = for_each_group("cycle_min_lr", cycle_min_lr, count)
        self.max_lrs = for_each_group("cycle_max_lr", cycle_max_lr, count)
        self.min_moms = for_each_group("cycle_min_mom", cycle_min_mom, count)
        self.max_moms = for_each_group("cycle_max_mom", cycle_max_mom, count)
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.cycle_momentum = cycle_momentum and _has_betas(optimizer)
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            if self.cycle_momentum:
                self._set_momentum(self.min_moms)

    @property
    def step_ratio(self) -> float:
        """The share of the cycle in which the learning rate rises."""
        return self.cycle.first / self.cycle.size

    def get_lr(self) -> list[float]:
        """Return the current learning rate of each param group."""
        if self._cycling:
            height = self.cycle.height(self.last_batch_iteration + 1)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        factor = 1 + self.decay_lr_rate * self._intervals()
        return [low / factor for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the current betas of each param group; None if the momentum is not cycled."""
        return [(mom, _SECOND_BETA) for mom in self._momentum()] if self.cycle_momentum else None

    def step(self, batch_iteration: int | None = None) -> None:
        """Count one more step, or set the count to ``batch_iteration`` + 1 steps, and set the learning rates."""
        super().step(batch_iteration)

    @property
    def _cycling(self) -> bool:
        return self.last_batch_iteration < self.cycle.size

    def _momentum(self) -> list[float]:
        if self._cycling:
            height = self.cycle.height(self.last_batch_iteration + 1)
            return [
                high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)
            ]
        factor = 1 + self.decay_mom_rate * self._intervals()
        return [high * factor for high in self.max_moms]

    def _intervals(self) -> float:
        """Return the number of decay intervals since the cycle ended."""
        if not self.cycle.decay:
            return 0.0
        return (self.last_batch_iteration - self.cycle.size + 1) / self.cycle.decay

    def _apply(self) -> None:
        super()._apply()
        if self.cycle_momentum:
            self._set_momentum(self._momentum())

    def _set_momentum(self, moms: Sequence[float]) -> None:
        for group, mom in zip(self.optimizer.param_groups, moms, strict=True):
            group["betas"] = (mom, _SECOND_BETA)


def _has_betas(optimizer: Any) -> bool:
    if all("betas" in group for group in optimizer.param_groups):
        return True
    if comm.is_initialized() and comm.get_rank() == 0:
        log.warning(f"OneCycle leaves momentum alone, since {type(optimizer).__name__} has no betas")
    return False
