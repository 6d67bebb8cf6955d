"""A data-parallel group that times its collectives by purpose (``wall_clock_breakdown``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from commprof import hooks
from zero_runtime.comm import COLLECTIVES, MESSAGES, DataParallelGroup, ProcessGroup
from zero_runtime.training.clock import Clock


class TimedGroup(DataParallelGroup):
    """A group with timed collectives. For an asynchronous one, the times to start it and to wait for it count.

    Args:
        group: torch's process group; None for all ranks.
        clock: a shared clock; None for a new one.

    Attributes:
        clock: the clock that the times are added to.
    """

    clock: Clock

    def __init__(self, group: ProcessGroup | None = None, clock: Clock | None = None) -> None:
        super().__init__(group)
        self.clock = Clock(True, self.device) if clock is None else clock


class TimedWork:
    """A work handle whose waiting is timed."""

    def __init__(self, work: Any, clock: Clock, purpose: str) -> None:
        self._work = work
        self._clock = clock
        self._purpose = purpose

    def wait(self, *arguments: Any) -> Any:
        """Wait for it."""
        with self._clock.communication(self._purpose):
            return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: TimedGroup, *arguments: Any, why: hooks.tag | None = None, **options: Any) -> Any:
        purpose = why.purpose if why is not None else "other"
        with self.clock.communication(purpose):
            work = method(self, *arguments, why=why, **options)
        return work if work is None else TimedWork(work, self.clock, purpose)

    return call


for _name in (*COLLECTIVES, *MESSAGES):
    setattr(TimedGroup, _name, _timed(getattr(DataParallelGroup, _name)))


def clock_of(group: DataParallelGroup) -> Clock:
    """The clock of ``group``; a stopped one if the group is not timed."""
    return group.clock if isinstance(group, TimedGroup) else Clock(False)
