"""The monotonic and the real-time clock, read together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


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
