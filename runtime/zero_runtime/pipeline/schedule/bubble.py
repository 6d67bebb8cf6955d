"""The pipeline bubble: the time in which a stage computes in a step, and the time in which it is idle."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.training.clock import Clock, Part

_METRIC: Final = hooks.tag("metric")
_WORK: Final = "work"
_STEP: Final = "step"


class Times(NamedTuple):
    """The times of a step on one stage, in seconds.

    Attributes:
        step: The time from the first to the last instruction of the schedule.
        work: The part of this time that the stage spends in computation.
    """

    step: float
    work: float

    @property
    def idle_fraction(self) -> float:
        """The share of the step without computation, in which the stage is idle, sends or receives."""
        return 1.0 - self.work / self.step if self.step > 0 else 0.0


class Bubble:
    """A measurement of the idle share of a stage.

    On CUDA the times are device times, and reading them waits for the device.

    Args:
        stages: The group with the ranks of all stages.
    """

    def __init__(self, stages: DataParallelGroup) -> None:
        self._stages = stages
        self._clock = Clock(True, stages.device)
        self._last: Times | None = None

    def working(self) -> AbstractContextManager[None]:
        """Return a context whose time counts as computation."""
        return self._clock(_WORK)

    def step(self) -> AbstractContextManager[None]:
        """Return a context whose time counts as the schedule of one step."""
        self._clock.read()
        self._last = None
        return self._clock(_STEP)

    def publish(self, expected: float) -> None:
        """Record the idle share of the step and the ``expected`` idle share as metrics.

        On CUDA nothing is recorded, because reading the times would wait for the device.
        """
        if hooks.recording() and self._stages.device.type != "cuda":
            hooks.metric("pipeline_bubble", self.times().idle_fraction)
            hooks.metric("pipeline_bubble_expected", expected)

    def times(self) -> Times:
        """Return the times of the last step on this stage."""
        if self._last is None:
            seconds = self._clock.read()
            self._last = Times(seconds.get(Part(_STEP), 0.0), seconds.get(Part(_WORK), 0.0))
        return self._last

    def idle_fraction(self) -> float:
        """Return the idle share of all stages in the last step: 1 - total work / (stages x longest step).

        All ranks must call this method, which issues one all_gather of two numbers over the stages.
        """
        mine = torch.tensor(self.times(), dtype=torch.float64, device=self._stages.device)
        everybody = mine.new_empty(2 * self._stages.world_size)
        self._stages.all_gather_single(everybody, mine, why=_METRIC)
        step, work = everybody.view(-1, 2).unbind(1)
        total_seconds = self._stages.world_size * float(step.max().item())
        return 1.0 - float(work.sum().item()) / total_seconds if total_seconds > 0 else 0.0
