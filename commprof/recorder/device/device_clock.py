"""Bounds the offset between the clock of a device and the clock of the host. Pure arithmetic.

The host time at which a device reaches an event is not known. But the device reaches the event after the host
enqueued the event and after the last query that found the event not reached. The device reaches the event
before the first query that found it reached. Each of these times bounds the offset from one side. The tightest
bounds count, and they are loosened over time, because clocks drift.
"""

from __future__ import annotations

from typing import Final

# The maximum relative drift of two clocks of one machine. Each crystal is specified to 50 ppm or less.
DRIFT: Final = 100e-6


class DeviceClock:
    """Converts times of a device to times of the host.

    Device times are nanoseconds on an axis that the caller chooses. The offset is the host time minus the
    device time. The tightest lower and upper bound of the offset are kept, each with the time at which it was
    found. At any other time a bound is looser, by the amount that the clocks may have drifted in between.
    """

    __slots__ = ("_high", "_high_known", "_high_since", "_low", "_low_known", "_low_since")

    def __init__(self) -> None:
        self._low = self._high = 0.0
        self._low_since = self._high_since = 0
        self._low_known = self._high_known = False

    def reached_after(self, device_ns: float, host_ns: int) -> None:
        """Register that the device reached ``device_ns`` at the host time ``host_ns`` or later."""
        offset = host_ns - device_ns
        if not self._low_known or offset >= self._low_at(host_ns):
            self._low, self._low_since, self._low_known = offset, host_ns, True
            # If the bounds contradict each other, the clocks drift faster than assumed. Only the new bound is kept.
            if self._high_known and offset > self._high_at(host_ns):
                self._high_known = False

    def reached_before(self, device_ns: float, host_ns: int) -> None:
        """Register that the device reached ``device_ns`` at the host time ``host_ns`` or earlier."""
        offset = host_ns - device_ns
        if not self._high_known or offset <= self._high_at(host_ns):
            self._high, self._high_since, self._high_known = offset, host_ns, True
            if self._low_known and offset < self._low_at(host_ns):
                self._low_known = False

    def offset(self, now_ns: int) -> float | None:
        """Return the offset to add to a device time to get a host time; None if no bound is known.

        The offset is the middle of the two bounds at the host time ``now_ns``, or the only bound that is known.
        """
        if self._low_known and self._high_known:
            return (self._low_at(now_ns) + self._high_at(now_ns)) / 2
        if self._low_known:
            return self._low
        return self._high if self._high_known else None

    def error_ns(self, now_ns: int) -> int | None:
        """Return the maximum error of :meth:`offset` in nanoseconds; None unless both bounds are known."""
        if not (self._low_known and self._high_known):
            return None
        return round((self._high_at(now_ns) - self._low_at(now_ns)) / 2)

    def _low_at(self, host_ns: int) -> float:
        return self._low - abs(host_ns - self._low_since) * DRIFT

    def _high_at(self, host_ns: int) -> float:
        return self._high + abs(host_ns - self._high_since) * DRIFT
