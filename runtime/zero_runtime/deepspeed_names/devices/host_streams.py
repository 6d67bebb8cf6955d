"""Streams and events of a CPU, for scripts that use the streams and events of a device."""

from __future__ import annotations

import time
from typing import Any


class HostStream:
    """A stream of a CPU. Calls are synchronous, so that there is nothing to wait for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Do nothing, because there is nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Do nothing, because there is nothing to wait for."""

    def synchronize(self) -> None:
        """Do nothing, because there is nothing to wait for."""

    def record_event(self, event: Any = None) -> HostEvent:
        """Record the current time in ``event`` or in a new event, and return the event."""
        event = event if event is not None else HostEvent()
        event.record()
        return event

    def query(self) -> bool:
        """Return whether all work is complete, which is always true."""
        return True

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


class HostEvent:
    """An event on a CPU: a point in time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self._at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the time from this event to ``end``, in milliseconds."""
        return (end._at - self._at) * 1e3

    def query(self) -> bool:
        """Return whether the event is complete, which is always true."""
        return True

    def synchronize(self) -> None:
        """Do nothing, because there is nothing to wait for."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing, because there is nothing to wait for."""
