"""The progress lines that rank 0 prints and the events that it writes to monitors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from zero_runtime import log
from zero_runtime.config import RuntimeConfig
from zero_runtime.startup.memory_status import memory_in_use
from zero_runtime.training.clock import Clock, Part, shown
from zero_runtime.training.monitors import Event, monitors


class Progress(NamedTuple):
    """The progress of the training after a step.

    Attributes:
        step: The number of steps.
        skipped: The number of these steps that were skipped because of an overflow.
        samples: The number of samples, over all ranks.
        rates: The learning rate of each param group.
        momenta: The momentum, or the betas, of each param group.
        loss_scale: The loss scale, or None if the loss is not scaled.
        batches: A function that returns the loss and the times of the complete batches since the last line.
            None if a step consists of several calls.
    """

    step: int
    skipped: int
    samples: int
    rates: list[float]
    momenta: list[object]
    loss_scale: float | None
    batches: Callable[[], BatchTimes] | None = None


class BatchTimes(NamedTuple):
    """The loss and the times of the complete batches since the last line.

    Attributes:
        loss: The loss of the last batch.
        seconds: The mean time of a batch, in seconds.
        samples_per_second: The number of samples per second, over all ranks.
    """

    loss: float
    seconds: float
    samples_per_second: float


class Report:
    """The reports that the configuration requests: progress lines, memory, times and monitor events.

    Args:
        config: The configuration.
        clock: The clock of the parts of a step.
        rank: This process's rank. Only rank 0 prints and writes.

    Attributes:
        milliseconds: The milliseconds of each part of the last step, if the clock is running.
    """

    def __init__(self, config: RuntimeConfig, clock: Clock, rank: int) -> None:
        self._every = config.steps_per_print
        self._memory = config.memory_breakdown
        self._clock = clock
        self._first = rank == 0
        self._monitors = monitors(config.csv_monitor, config.tensorboard, rank)
        self._losses: list[torch.Tensor] = []
        self._seconds: dict[Part, float] = {}
        self._steps = 0
        self.milliseconds: dict[str, float] = {}

    def see_loss(self, loss: torch.Tensor) -> None:
        """Store the loss of a micro-batch for the monitors, without division and without the loss scale."""
        if self._monitors:
            self._losses.append(loss.detach())

    def see_memory(self, when: str) -> None:
        """Print the memory in use, if memory_breakdown is true."""
        if self._memory and self._first:
            self._say(f"{when}: {memory_in_use().shown()}")

    def see_step(self, progress: Progress) -> None:
        """Print and write the reports that are due after a step."""
        seconds = self._clock.read() if self._clock.running else {}
        if not self._first:
            return
        due = self._every is not None and progress.step % self._every == 0
        if due:
            self._say(
                f"step={progress.step}, skipped={progress.skipped}, lr={progress.rates}, mom={progress.momenta}"
            )
        if due and progress.batches is not None:
            batch = progress.batches()
            self._say(
                f"steps: {progress.step} loss: {batch.loss:0.4f} iter time (s): {batch.seconds:0.3f} "
                f"samples/sec: {batch.samples_per_second:0.3f}"
            )
        if self._clock.running:
            self._see_times(seconds, progress.step, due or self._every is None)
        if self._monitors:
            self._write(progress)

    def _see_times(self, seconds: dict[Part, float], step: int, due: bool) -> None:
        self.milliseconds = {part.name: value * 1e3 for part, value in seconds.items() if not part.purpose}
        self._steps += 1
        for part, value in seconds.items():
            self._seconds[part] = self._seconds.get(part, 0.0) + value
        if due:
            mean = f", mean of {self._steps} steps" if self._steps > 1 else ""
            self._say(f"step {step}, ms{mean}: {shown(self._seconds, self._steps)}")
            self._seconds, self._steps = {}, 0

    def _write(self, progress: Progress) -> None:
        events = [Event("Train/Samples/lr", rate, progress.samples) for rate in progress.rates[:1]]
        if self._losses:
            loss = torch.stack([each.float().reshape(()) for each in self._losses]).mean()
            events.insert(0, Event("Train/Samples/train_loss", loss.item(), progress.samples))
            self._losses.clear()
        if progress.loss_scale is not None:
            events.append(Event("Train/Samples/loss_scale", progress.loss_scale, progress.samples))
        for part, value in self.milliseconds.items():
            name = {"optimizer": "step"}.get(part, part)
            events.append(Event(f"Train/Samples/elapsed_time_ms_{name}", value, progress.samples))
        for monitor in self._monitors:
            monitor.write_events(events)

    @staticmethod
    def _say(sentence: str) -> None:
        log.info(sentence)
