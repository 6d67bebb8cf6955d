"""Streams and events of a CPU, for scripts that use those of a device."""

from __future__ import annotations

import time
from typing import Any


class HostStream:
    """A stream of a CPU: calls are synchronous, so that there is nothing to wait for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> HostEvent:
        """An event of the current time."""
        event = event if event is not None else HostEvent()
        event.record()
        return event

    def query(self) -> bool:
        """Whether all work is complete; always."""
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
        """Milliseconds until ``end``."""
        return (end._at - self._at) * 1e3

    def query(self) -> bool:
        """Whether the event is complete; always."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""
