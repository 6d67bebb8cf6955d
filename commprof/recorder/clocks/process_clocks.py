"""Clocks of a process: reads monotonic and real time together, and computes the offset of another monotonic clock."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

# Two clocks are taken to run apart by less than this: the crystals of computers are specified to 50 ppm or better.
DRIFT_LIMIT: Final = 100e-6
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE: Final = Path("/proc/self/ns/time")


class ClockPair(NamedTuple):
    """CLOCK_MONOTONIC and CLOCK_REALTIME at one moment, to within ``uncertainty_ns``."""

    monotonic_ns: int
    realtime_ns: int
    uncertainty_ns: int


def read_clocks(
    monotonic: Callable[[], int] = time.perf_counter_ns,
    realtime: Callable[[], int] = time.time_ns,
    tries: int = 5,
) -> ClockPair:
    """Both clocks: the tightest of ``tries`` readings, with the monotonic time halfway between its two reads."""
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
    """Which clock CLOCK_MONOTONIC is here: equal in two processes exactly when they read one and the same clock.

    A kernel has one such clock from boot to boot, shifted in each time namespace. Host names say nothing about it: the
    containers of a host have names of their own, and two hosts may have one name. Where the kernel does not tell its
    boot, every process counts as having a clock of its own.
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
    """A question and its answer: sent and arrived by our clock, received and answered by the other one. In ns."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    arrived_ns: int

    @property
    def lowest(self) -> int:
        """What the other clock is ahead at least: its answer left before it arrived."""
        return self.answered_ns - self.arrived_ns

    @property
    def highest(self) -> int:
        """What the other clock is ahead at most: our question had left when it was received."""
        return self.received_ns - self.sent_ns

    @property
    def middle_ns(self) -> int:
        """The moment of the exchange by our clock."""
        return (self.sent_ns + self.arrived_ns) // 2

    @property
    def reach_ns(self) -> int:
        """How far the exchange reaches from its middle."""
        return self.arrived_ns - self.middle_ns


class Offset(NamedTuple):
    """How far another clock is ahead of ours, at ``time_ns`` by ours: by ``offset_ns``, wrong by ``error_ns`` at most."""

    time_ns: int
    offset_ns: int
    error_ns: int
    exchanges: int


def estimate(exchanges: Sequence[Exchange], drift_limit: float = DRIFT_LIMIT) -> Offset:
    """The offset that ``exchanges`` (one at least) allow, with its bound.

    A message takes no negative time, so each exchange confines the offset to ``[lowest, highest]``, whatever the delays of
    the two ways are and however unequal. All exchanges together confine it to the part that these intervals share,
    each widened by what the clocks may drift apart between it and the middle of the tightest one, for which the answer is.
    The answer is the middle of that part, its error half the width. With one exchange that is the rule of NTP (RFC 5905,
    section 8). Intervals that share nothing (a clock that jumped) leave the tightest one.
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
