"""Reads the monotonic and real-time clocks of a process together, and estimates offsets of monotonic clocks."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

# The assumed maximum relative drift of two clocks. Crystals of computers are specified to 50 ppm or better.
DRIFT_LIMIT: Final = 100e-6
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE: Final = Path("/proc/self/ns/time")


class ClockPair(NamedTuple):
    """CLOCK_MONOTONIC and CLOCK_REALTIME at the same time, to within ``uncertainty_ns``."""

    monotonic_ns: int
    realtime_ns: int
    uncertainty_ns: int


def read_clocks(
    monotonic: Callable[[], int] = time.perf_counter_ns,
    realtime: Callable[[], int] = time.time_ns,
    tries: int = 5,
) -> ClockPair:
    """Return a reading of both clocks: the tightest of ``tries`` readings.

    The monotonic time is halfway between the two reads of the monotonic clock.
    """
    best: ClockPair | None = None
    for _ in range(tries):
        before = monotonic()
        now = realtime()
        after = monotonic()
        if best is None or after - before < best.uncertainty_ns:
            best = ClockPair((before + after) // 2, now, after - before)
    assert best is not None
    return best


def clock_identity(boot_id: Path = _BOOT_ID, time_namespace: Path = _TIME_NAMESPACE) -> str:
    """Return the identity of CLOCK_MONOTONIC. It is equal in two processes if and only if they read the same clock.

    A kernel has one such clock for each boot, shifted in each time namespace. Host names do not identify the
    clock, because containers of a host have their own names, and two hosts may have the same name. If the
    kernel does not provide its boot id, every process is treated as having its own clock.
    """
    try:
        boot = boot_id.read_text("ascii").strip()
    except (OSError, ValueError):
        return f"{socket.gethostname()}:{os.getpid()}"
    try:
        return f"{boot}:{time_namespace.stat().st_ino}"
    except OSError:
        return boot  # Linux before 5.6 has no time namespaces


class Exchange(NamedTuple):
    """The four times of a question and its answer, in nanoseconds.

    Attributes:
        sent_ns: The time at which the question was sent, by this process's clock.
        received_ns: The time at which the question was received, by the other clock.
        answered_ns: The time at which the answer was sent, by the other clock.
        arrived_ns: The time at which the answer arrived, by this process's clock.
    """

    sent_ns: int
    received_ns: int
    answered_ns: int
    arrived_ns: int

    @property
    def lowest(self) -> int:
        """The minimum by which the other clock is ahead, because the answer was sent before it arrived."""
        return self.answered_ns - self.arrived_ns

    @property
    def highest(self) -> int:
        """The maximum by which the other clock is ahead, because the question was sent before it was received."""
        return self.received_ns - self.sent_ns

    @property
    def middle_ns(self) -> int:
        """The middle of the exchange by this process's clock."""
        return (self.sent_ns + self.arrived_ns) // 2

    @property
    def reach_ns(self) -> int:
        """Half the duration of the exchange."""
        return self.arrived_ns - self.middle_ns


class Offset(NamedTuple):
    """The time by which another clock is ahead of this process's clock.

    Attributes:
        time_ns: The time for which the offset is valid, by this process's clock.
        offset_ns: The offset.
        error_ns: The maximum error of the offset.
        exchanges: The number of exchanges from which the offset was estimated.
    """

    time_ns: int
    offset_ns: int
    error_ns: int
    exchanges: int


def estimate(exchanges: Sequence[Exchange], drift_limit: float = DRIFT_LIMIT) -> Offset:
    """Estimate the offset from ``exchanges`` (at least one), with an error bound.

    The transit time of a message is never negative. So each exchange confines the offset to ``[lowest,
    highest]``, for any delays in the two directions. The estimate is for the middle of the tightest exchange.
    The interval of each exchange is widened by the possible drift of the clocks between that exchange and this
    middle. The offset is in the intersection of the widened intervals. The estimate is the middle of the
    intersection, and its error is half the width. With one exchange this is the rule of NTP (RFC 5905, section
    8). If the intersection is empty because a clock jumped, only the tightest exchange is used.
    """
    tightest = min(exchanges, key=lambda exchange: (exchange.highest - exchange.lowest, exchange.reach_ns))
    moment = tightest.middle_ns

    def confined(exchange: Exchange) -> tuple[int, int]:
        drift = math.ceil(drift_limit * (abs(exchange.middle_ns - moment) + exchange.reach_ns))
        return exchange.lowest - drift, exchange.highest + drift

    intervals = [confined(exchange) for exchange in exchanges]
    lowest, highest = max(low for low, _ in intervals), min(high for _, high in intervals)
    if lowest > highest:
        lowest, highest = confined(tightest)
    middle = (lowest + highest) // 2
    return Offset(moment, middle, highest - middle, len(exchanges))
