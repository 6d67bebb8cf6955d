"""A simulated device with a default stream and a side stream.

The clock of the device differs from the clock of the host by an offset and a rate that tests choose.
"""

from __future__ import annotations

import struct
from typing import Any


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.reached_ns: float | None = None  # in host time; the recorder cannot read this value

    def query(self) -> bool:
        assert not self.device.capturing, "asked during a capture"
        self.device.queries += 1
        return self.reached_ns is not None and self.device.now >= self.reached_ns

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.reached_ns is not None and end.reached_ns is not None
        assert self.device.now >= max(self.reached_ns, end.reached_ns), "asked before it was reached"
        begin, last = (self.device.device_time(event.reached_ns) for event in (self, end))
        # CUDA returns single precision.
        return struct.unpack("f", struct.pack("f", (last - begin) / 1e6))[0]

    def synchronize(self) -> None:
        raise AssertionError("the recorder must never wait for a device")

    wait = synchronize


class FakeStream:
    """The stream object that a program passes to the recorder."""

    def __init__(self, index: int, handle: int) -> None:
        self.device_index = index
        self.cuda_stream = handle


class FakeDevice:
    """A simulated device and the clock of its host.

    Attributes:
        now: The time of the host in ns.
        busy_until: The host time in ns at which the default stream has finished its work.
        side_busy_until: The host time in ns at which the side stream has finished its work.
        aside: Whether the side stream is the current stream.
    """

    def __init__(self, offset_ns: int = 0, drift: float = 0.0) -> None:
        self.now = 1_000_000_000
        self.busy_until = 0.0
        self.side_busy_until = 0.0
        self.offset_ns = offset_ns
        self.drift = drift
        self.capturing = False
        self.aside = False
        self.queries = 0
        self.made: list[FakeEvent] = []
        self.indices: set[int] = set()

    def clock(self) -> int:
        self.now += 100  # reading the clock takes 100 ns
        return self.now

    def work(self, ns: float) -> None:
        """Queue ``ns`` nanoseconds of work in the current stream."""
        if self.aside:
            self.side_busy_until = max(self.side_busy_until, self.now) + ns
        else:
            self.busy_until = max(self.busy_until, self.now) + ns

    def wait(self) -> None:
        """Let the current stream wait for the work that is now queued in the other stream."""
        if self.aside:
            self.side_busy_until = max(self.side_busy_until, self.busy_until)
        else:
            self.busy_until = max(self.busy_until, self.side_busy_until)

    def device_time(self, host_ns: float) -> float:
        return host_ns * (1 + self.drift) + self.offset_ns

    # The methods below implement commprof.recorder.device.device_events.EventSource.

    def record(self, event: Any, index: int, stream: FakeStream | None = None) -> FakeEvent:
        assert not self.capturing, "an event during a capture"
        self.indices.add(index)
        if event is None:
            event = FakeEvent(self)
            self.made.append(event)
        on_side = self.aside if stream is None else stream.cuda_stream != 0
        event.reached_ns = max(self.side_busy_until if on_side else self.busy_until, self.now)
        return event

    def is_aside(self, index: int) -> bool:
        return self.aside

    def is_capturing(self) -> bool:
        return self.capturing
