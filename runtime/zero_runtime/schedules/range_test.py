"""DeepSpeed's LRRangeTest: a rising learning rate, to find the largest one that trains."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zero_runtime.schedules.iterations import IterationSchedule, for_each_group, whole_number


class LRRangeTest(IterationSchedule):
    """A schedule that multiplies a minimum learning rate by 1 + rate * interval.

    The interval is the number of steps divided by the step size. The method is described in Smith, "A
    disciplined approach to neural network hyper-parameters: Part 1" (arXiv:1803.09820).

    Args:
        optimizer: The optimizer whose ``lr`` is set.
        lr_range_test_min_lr: The first learning rate: one value for all param groups, or one for each.
        lr_range_test_step_size: The number of steps in an interval.
        lr_range_test_step_rate: The growth in each interval, as a multiple of the minimum.
        lr_range_test_staircase: Whether the rate grows only at the end of each interval, instead of in every step.
        last_batch_iteration: The number of steps already taken, minus one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        count = len(optimizer.param_groups)
        self.min_lr = for_each_group("lr_range_test_min_lr", lr_range_test_min_lr, count)
        self.step_size = whole_number("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[float]:
        """Return the current learning rate of each param group."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [low * growth for low in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        """Count one more step, or set the count to ``batch_iteration`` + 1 steps, and set the learning rates."""
        super().step(batch_iteration)
