"""``deepspeed.utils.timer``: named timers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from zero_runtime.deepspeed_names.devices.accelerator import get_accelerator
from zero_runtime.deepspeed_names.ranks.logging_names import log_dist
from zero_runtime.errors import UsageError
from zero_runtime.groups.comm_log import trimmed_mean
from zero_runtime.startup.memory_status import memory_in_use

FORWARD_MICRO_TIMER: Final = "fwd_microstep"
FORWARD_GLOBAL_TIMER: Final = "fwd"
BACKWARD_MICRO_TIMER: Final = "bwd_microstep"
BACKWARD_GLOBAL_TIMER: Final = "bwd"
BACKWARD_INNER_MICRO_TIMER: Final = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER: Final = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER: Final = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER: Final = "bwd_allreduce"
STEP_MICRO_TIMER: Final = "step_microstep"
STEP_GLOBAL_TIMER: Final = "step"
PSUTILS_INSTALLED: Final = False


class NamedTimer:
    """A timer that sums the times between ``start`` and ``stop``: device time on CUDA, host time on other devices.

    Args:
        name: The name of the timer.
    """

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._begin: Any = None
        # Each entry is a time in milliseconds, or the events at both ends.
        self._passed: list[float | tuple[Any, Any]] = []
        self._means: list[float] = []

    def start(self) -> None:
        """Start the timer."""
        if self.started_:
            raise UsageError(f"timer {self.name_} is already running; stop it first")
        self._begin = _now()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop the timer.

        Args:
            reset: Whether the earlier times are dropped from the sum.
            record: Whether the time is recorded for :meth:`mean`.
        """
        if not self.started_:
            raise UsageError(f"timer {self.name_} is not running; start it first")
        end = _now()
        passed = (end - self._begin) * 1e3 if isinstance(end, float) else (self._begin, end)
        self.started_ = False
        if reset:
            self._passed.clear()
        self._passed.append(passed)
        if record:
            self._means.append(_milliseconds(passed))

    def reset(self) -> None:
        """Reset the timer."""
        self.started_ = False
        self._begin = None
        self._passed.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the sum in milliseconds. A running timer continues."""
        running = self.started_
        if running:
            self.stop()
        total = sum(map(_milliseconds, self._passed))
        if reset:
            self._passed.clear()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Return the trimmed mean of the recorded times, in milliseconds."""
        return trimmed_mean(self._means)


class SynchronizedWallClockTimer:
    """A set of timers with names."""

    Timer = NamedTimer

    def __init__(self) -> None:
        self.timers: dict[str, NamedTimer] = {}

    def __call__(self, name: str) -> NamedTimer:
        """Return the timer with this name, and create it if it does not exist."""
        return self.timers.setdefault(name, NamedTimer(name))

    def get_timers(self) -> dict[str, NamedTimer]:
        """Return all timers by name."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Return the memory in use, as text."""
        return memory_in_use().shown()

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the milliseconds of some timers, divided by ``normalizer``, on ``ranks`` (default: rank 0)."""
        _check(normalizer)
        known = [name for name in names if name in self.timers]
        times = [f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in known]
        memory = f" | {self.memory_usage()}" if memory_breakdown else ""
        log_dist(f"time (ms) | {' | '.join(times)}{memory}", ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean times of some timers in milliseconds, divided by ``normalizer``, by name."""
        _check(normalizer)
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in means:
            if reset:
                self.timers[name].reset()
        return means


class NoopTimer:
    """Timers that measure nothing."""

    class Timer:
        """A timer that measures nothing."""

        def start(self) -> None:
            """Do nothing."""

        def reset(self) -> None:
            """Do nothing."""

        def stop(self, **options: Any) -> None:
            """Do nothing."""

        def elapsed(self, **options: Any) -> float:
            """Return 0."""
            return 0.0

        def mean(self) -> float:
            """Return 0."""
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Any:
        """Return the timer that measures nothing."""
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        """Return an empty dictionary."""
        return {}

    def log(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""

    def get_mean(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean of ``data`` without its smallest and its largest values.

    Args:
        data: The values.
        trim_percent: The share of the values that is left out at each end, from 0 to 1.
    """
    if not 0.0 <= trim_percent <= 1.0:
        raise UsageError(f"trim_percent is {trim_percent}; expected a number from 0 to 1")
    return trimmed_mean(data, trim_percent)


def _now() -> Any:
    if get_accelerator().use_host_timers():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(passed: Any) -> float:
    if isinstance(passed, float):
        return passed
    begin, end = passed
    end.synchronize()
    return float(begin.elapsed_time(end))


def _check(normalizer: float) -> None:
    if normalizer <= 0.0:
        raise UsageError(f"normalizer is {normalizer}; expected a number above 0")
