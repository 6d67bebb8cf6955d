"""Host time in each part of a step, for ``wall_clock_breakdown``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up host time by part; does nothing unless ``running``. Device work may go on after a part has ended."""

    def __init__(self, running: bool) -> None:
        self._running = running
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count the block as ``part``."""
        if not self._running:
            yield
            return
        begin = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - begin

    def report(self, step: int) -> None:
        """Print the times and begin again."""
        if self._running:
            parts = ", ".join(f"{part} {seconds * 1e3:.2f} ms" for part, seconds in self._seconds.items())
            print(f"step {step}: {parts}", file=sys.stderr, flush=True)
            self._seconds = {}
