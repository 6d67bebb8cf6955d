"""Times of a data-parallel group's collectives, by purpose (``wall_clock_breakdown``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from zero_runtime.comm import COLLECTIVES, MESSAGES, Call, DataParallelGroup
from zero_runtime.training.clock import Clock


class Timer:
    """An observer that adds the time of each call to a clock.

    For an asynchronous call, the clock counts the time to start it and the time to wait for it.

    Attributes:
        clock: The clock, which the groups of one engine share.
        methods: The observed methods (:class:`zero_runtime.comm.Observer`).
    """

    methods: Final = frozenset({*COLLECTIVES, *MESSAGES})

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def observe(self, call: Call, issue: Callable[[], Any]) -> Any:
        """Issue the call and time it (:class:`zero_runtime.comm.Observer`)."""
        purpose = call.why.purpose if call.why is not None else "other"
        with self.clock.communication(purpose):
            work = issue()
        return work if work is None else TimedWork(work, self.clock, purpose)


class TimedWork:
    """A work handle that times the wait for its collective."""

    def __init__(self, work: Any, clock: Clock, purpose: str) -> None:
        self._work = work
        self._clock = clock
        self._purpose = purpose

    def wait(self, *arguments: Any) -> Any:
        """Wait for the collective, and add the time to the clock."""
        with self._clock.communication(self._purpose):
            return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def clock_of(group: DataParallelGroup) -> Clock:
    """Return the clock of ``group``, or a stopped clock if the group is not timed."""
    clocks = (each.clock for each in group.observers if isinstance(each, Timer))
    return next(clocks, None) or Clock(False)
