"""Samples per second, measured around the micro-batches of each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch

from zero_runtime import log
from zero_runtime.startup.memory_status import memory_in_use

TIME_EPSILON: Final = 1e-6


class ThroughputTimer:
    """A timer that measures samples per second.

    Args:
        config: An object with ``enabled`` and ``synchronized``; None enables both. With ``synchronized`` the
            timer waits for the device before each reading, if lines are printed.
        batch_size: The number of samples of a step, over all ranks.
        start_step: The number of first steps that are not counted.
        steps_per_output: The number of steps between two lines. None or infinity prints no lines.
        monitor_memory: Whether to print the memory in use too.
        logging_fn: The function that is called with each line.

    Attributes:
        initialized: Whether ``start`` was called.
        started: Whether a micro-batch is running.
        start_time, end_time: The times of the last micro-batch that was counted, in seconds since 1970; 0
            before the first one.
        step_elapsed_time: The seconds of the current step.
        total_elapsed_time: The seconds of all steps that were counted.
    """

    def __init__(
        self,
        config: Any = None,
        batch_size: int | None = 1,
        start_step: int = 2,
        steps_per_output: float | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = 1 if batch_size is None else batch_size
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or log.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.initialized = self.started = False
        self.start_time = self.end_time = 0.0

    @property
    def enabled(self) -> bool:
        """Whether times are measured."""
        return bool(getattr(self.config, "enabled", True))

    def update_epoch_count(self) -> None:
        """Count an epoch, and set its number of micro-batches to 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a micro-batch."""
        if not self.enabled:
            return
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self._synchronize()
            self.start_time = time.time()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End the micro-batch, and print a line if one is due.

        Args:
            global_step: Whether the step ends with this micro-batch.
            report_speed: Whether a line may be printed.
        """
        if not self.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += int(global_step)
        if not self.start_time:
            return
        self._synchronize()
        self.end_time = time.time()
        passed = self.end_time - self.start_time
        self.total_elapsed_time += passed
        self.step_elapsed_time += passed
        every = self.steps_per_output
        if global_step and report_speed and every and self.global_step_count % every == 0:
            last = self.batch_size / (self.step_elapsed_time + TIME_EPSILON)
            memory = f", {memory_in_use().shown()}" if self.monitor_memory else ""
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.2f}, CurrSamplesPerSec={last:.2f}{memory}"
            )
        if global_step:
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return samples per second over the steps that were counted, or minus infinity before the first one."""
        counted = self.global_step_count - self.start_step
        if counted <= 0 or not self.total_elapsed_time:
            return float("-inf")
        return self.batch_size * counted / self.total_elapsed_time

    def _synchronize(self) -> None:
        wanted = self.steps_per_output and getattr(self.config, "synchronized", True)
        if wanted and torch.cuda.is_initialized():
            torch.cuda.synchronize()
