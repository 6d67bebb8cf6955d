"""Measurement of the parts of a training step and of the communication in each part (``wall_clock_breakdown``)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, NamedTuple

import torch

_OFF: Final = nullcontext()


class Part(NamedTuple):
    """A part of a step, or the communication of one purpose within it."""

    name: str
    purpose: str | None = None


class Clock:
    """A clock that sums the time of each part of a step.

    On CUDA the times are device times, measured with events. Only ``read`` synchronizes the events.

    Args:
        running: Whether the clock measures. If false, it measures nothing.
        device: The device of the computation.
    """

    def __init__(self, running: bool, device: torch.device | None = None) -> None:
        self.running = running
        self._cuda = running and device is not None and device.type == "cuda"
        self._seconds: dict[Part, float] = {}
        self._events: list[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = []
        self._open: list[str] = []

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time is added to the part ``name``."""
        return self._part(name) if self.running else _OFF

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        self._open.append(name)
        try:
            with self._measured(Part(name)):
                yield
        finally:
            self._open.remove(name)

    def communication(self, purpose: str) -> AbstractContextManager[None]:
        """Return a context whose time is added to the communication for ``purpose`` in the current part."""
        if not self.running:
            return _OFF
        return self._measured(Part(self._open[-1] if self._open else "between", purpose))

    @contextmanager
    def _measured(self, part: Part) -> Iterator[None]:
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((part, begin, end))
            return
        start = time.perf_counter()
        yield
        self._add(part, time.perf_counter() - start)

    def _add(self, part: Part, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def read(self) -> dict[Part, float]:
        """Return the seconds of each part since the last call, in the order in which the parts first ended.

        The call waits for the device.
        """
        for part, begin, end in self._events:
            end.synchronize()
            self._add(part, begin.elapsed_time(end) / 1e3)
        self._events.clear()
        seconds, self._seconds = self._seconds, {}
        return seconds


def shown(seconds: dict[Part, float], steps: int) -> str:
    """Return a text with the mean milliseconds per step of each part, and its communication in parentheses.

    Args:
        seconds: The sum of the seconds of each part.
        steps: The number of steps that were summed.
    """
    sentences = []
    for name in dict.fromkeys(part.name for part in seconds):
        inside = [
            f"{part.purpose} {value / steps * 1e3:.2f}"
            for part, value in seconds.items()
            if part.name == name and part.purpose is not None
        ]
        total = seconds.get(Part(name))
        text = name if total is None else f"{name} {total / steps * 1e3:.2f}"
        sentences.append(f"{text} ({', '.join(inside)})" if inside else text)
    return ", ".join(sentences)
