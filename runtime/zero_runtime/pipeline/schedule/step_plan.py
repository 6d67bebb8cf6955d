"""The plan of a pipeline: its schedule by name, for a number of stages."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from zero_runtime.errors import ConfigError
from zero_runtime.pipeline.schedule import pipeline_schedules
from zero_runtime.pipeline.schedule.pipeline_schedules import Schedule
from zero_runtime.pipeline.schedule.schedule_simulation import simulate

INTERLEAVED = "interleaved"
ZERO_BUBBLE = "zero_bubble"
DEFAULT_CHUNKS = 2


class Plan(NamedTuple):
    """A schedule by its name in the configuration, for a number of stages.

    Attributes:
        name: 1f1b, gpipe, interleaved or zero_bubble.
        stages: ranks that share a model.
        chunks: chunks of the model on each rank; 1 except for interleaved.
    """

    name: str
    stages: int
    chunks: int = 1

    @property
    def begins_messages(self) -> bool:
        """Whether its messages are asynchronous: started, and waited for later."""
        return self.name in (INTERLEAVED, ZERO_BUBBLE)

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass is in two halves: the gradients of inputs, and those of weights."""
        return self.name == ZERO_BUBBLE

    def check(self, micro_batches: int) -> None:
        """Raise ConfigError if the schedule does not support ``micro_batches`` in a step."""
        if self.name == INTERLEAVED and micro_batches % self.stages:
            raise ConfigError(
                f"pipeline_parallel.schedule interleaved works on {self.stages} micro-batches at a time, one for each "
                f"stage, and a step has {micro_batches} (gradient_accumulation_steps, or pipeline_parallel.micro_batches); "
                f"make that a multiple of {self.stages}, or use schedule 1f1b"
            )

    def training(self, micro_batches: int, stage: int) -> Schedule:
        """The schedule of a training step on the rank of ``stage``."""
        if self.name == INTERLEAVED:
            return pipeline_schedules.interleaved(self.stages, micro_batches, stage, self.chunks)
        functions = {
            "1f1b": pipeline_schedules.one_f_one_b,
            "gpipe": pipeline_schedules.gpipe,
            ZERO_BUBBLE: pipeline_schedules.zero_bubble,
        }
        return functions[self.name](self.stages, micro_batches, stage)

    def inference(self, micro_batches: int, stage: int) -> Schedule:
        """What the rank of ``stage`` does in an evaluation."""
        if self.chunks > 1:
            return pipeline_schedules.interleaved_inference(self.stages, micro_batches, stage, self.chunks)
        return pipeline_schedules.inference(self.stages, micro_batches, stage)

    def idle_fraction(self, micro_batches: int) -> float:
        """The share of a step in which ranks are idle, where all computations take equal time, and messages none."""
        if self.name == ZERO_BUBBLE:
            return _zero_bubble_idle_fraction(self.stages, micro_batches)
        return pipeline_schedules.idle_fraction(self.stages, micro_batches, self.chunks)


@lru_cache(maxsize=8)
def _zero_bubble_idle_fraction(stages: int, micro_batches: int) -> float:
    """The formula where there are at least as many micro-batches as stages; it does not hold for fewer."""
    if micro_batches >= stages:
        return pipeline_schedules.zero_bubble_idle_fraction(stages, micro_batches, 1.0, 1.0, 1.0)
    ranks = [pipeline_schedules.zero_bubble(stages, micro_batches, stage) for stage in range(stages)]
    return simulate(ranks).idle_fraction
