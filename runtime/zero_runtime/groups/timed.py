"""Times of a data-parallel group's collectives by purpose (``wall_clock_breakdown``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from zero_runtime.comm import COLLECTIVES, MESSAGES, Call, DataParallelGroup
from zero_runtime.training.clock import Clock


class Timer:
    """Adds the time of each call to a clock. For an asynchronous one, the times to start it and to wait for it count.

    Attributes:
        clock: the clock, which the groups of one engine share.
        methods: as of :class:`zero_runtime.comm.Observer`.
    """

    methods: Final = frozenset({*COLLECTIVES, *MESSAGES})

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def observe(self, call: Call, issue: Callable[[], Any]) -> Any:
        """As of :class:`zero_runtime.comm.Observer`."""
        purpose = call.why.purpose if call.why is not None else "other"
        with self.clock.communication(purpose):
            work = issue()
        return work if work is None else TimedWork(work, self.clock, purpose)


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


def clock_of(group: DataParallelGroup) -> Clock:
    """The clock of ``group``; a stopped one if the group is not timed."""
    clocks = (each.clock for each in group.observers if isinstance(each, Timer))
    return next(clocks, None) or Clock(False)
