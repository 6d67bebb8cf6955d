"""The plan of a pipeline: the name of its schedule and the number of stages."""

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
    """A schedule, identified by its name in the configuration, for a number of stages.

    Attributes:
        name: The name of the schedule: 1f1b, gpipe, interleaved or zero_bubble.
        stages: The number of ranks that share a model.
        chunks: The number of chunks of the model on each rank, which is 1 except for interleaved.
    """

    name: str
    stages: int
    chunks: int = 1

    @property
    def begins_messages(self) -> bool:
        """Whether the messages of the schedule are asynchronous, so that ranks wait for them later."""
        return self.name in (INTERLEAVED, ZERO_BUBBLE)

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass has two halves, one for the gradients of inputs and one for those of weights."""
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
        """Return the schedule of a training step on the rank of ``stage``."""
        if self.name == INTERLEAVED:
            return pipeline_schedules.interleaved(self.stages, micro_batches, stage, self.chunks)
        functions = {
            "1f1b": pipeline_schedules.one_f_one_b,
            "gpipe": pipeline_schedules.gpipe,
            ZERO_BUBBLE: pipeline_schedules.zero_bubble,
        }
        return functions[self.name](self.stages, micro_batches, stage)

    def inference(self, micro_batches: int, stage: int) -> Schedule:
        """Return the schedule of an evaluation on the rank of ``stage``."""
        if self.chunks > 1:
            return pipeline_schedules.interleaved_inference(self.stages, micro_batches, stage, self.chunks)
        return pipeline_schedules.inference(self.stages, micro_batches, stage)

    def idle_fraction(self, micro_batches: int) -> float:
        """Return the share of a step in which ranks are idle.

        The value assumes that all computations take equal time and that messages take no time.
        """
        if self.name == ZERO_BUBBLE:
            return _zero_bubble_idle_fraction(self.stages, micro_batches)
        return pipeline_schedules.idle_fraction(self.stages, micro_batches, self.chunks)


@lru_cache(maxsize=8)
def _zero_bubble_idle_fraction(stages: int, micro_batches: int) -> float:
    """Return the idle share of ZB-H1 if all computations take equal time.

    The formula is valid only with at least as many micro-batches as stages. Otherwise the schedule is
    simulated.
    """
    if micro_batches >= stages:
        return pipeline_schedules.zero_bubble_idle_fraction(stages, micro_batches, 1.0, 1.0, 1.0)
    ranks = [pipeline_schedules.zero_bubble(stages, micro_batches, stage) for stage in range(stages)]
    return simulate(ranks).idle_fraction
