"""Bounds of the offset between the clocks of a device and of the host. Pure arithmetic.

The host time at which a device reaches a mark is not known. But the device reaches it after the host enqueued it, after the
last query that found it not reached, and before the first query that found it reached. Each of these bounds the offset from
one side. The tightest bounds count, and are loosened with time, because clocks drift.
"""

from __future__ import annotations

from typing import Final

# How fast two clocks of one machine part at most. Crystals are specified to 50 millionths or less, each.
DRIFT: Final = 100e-6


class DeviceClock:
    """Converts times of a device to times of the host.

    Device times are nanoseconds on an axis of the caller's choice. Of each bound of the offset (host less device) the
    tightest is kept, with when it was found: at another time it is worth less, by what the clocks may have drifted since.
    """

    __slots__ = ("_high", "_high_known", "_high_since", "_low", "_low_known", "_low_since")

    def __init__(self) -> None:
        self._low = self._high = 0.0
        self._low_since = self._high_since = 0
        self._low_known = self._high_known = False

    def reached_after(self, device_ns: float, host_ns: int) -> None:
        """The device was at ``device_ns`` at ``host_ns`` of the host or later."""
        offset = host_ns - device_ns
        if not self._low_known or offset >= self._low_at(host_ns):
            self._low, self._low_since, self._low_known = offset, host_ns, True
            # Where the bounds exclude each other the clocks part faster than assumed: only the new one is believed.
            if self._high_known and offset > self._high_at(host_ns):
                self._high_known = False

    def reached_before(self, device_ns: float, host_ns: int) -> None:
        """The device was at ``device_ns`` at ``host_ns`` of the host or earlier."""
        offset = host_ns - device_ns
        if not self._high_known or offset <= self._high_at(host_ns):
            self._high, self._high_since, self._high_known = offset, host_ns, True
            if self._low_known and offset < self._low_at(host_ns):
                self._low_known = False

    def offset(self, now_ns: int) -> float | None:
        """What to add to a device time for the host's, as known at ``now_ns``: the middle of what is possible."""
        if self._low_known and self._high_known:
            return (self._low_at(now_ns) + self._high_at(now_ns)) / 2
        if self._low_known:
            return self._low
        return self._high if self._high_known else None

    def error_ns(self, now_ns: int) -> int | None:
        """How far :meth:`offset` may be off; None while only one side is bounded."""
        if not (self._low_known and self._high_known):
            return None
        return round((self._high_at(now_ns) - self._low_at(now_ns)) / 2)

    def _low_at(self, host_ns: int) -> float:
        return self._low - abs(host_ns - self._low_since) * DRIFT

    def _high_at(self, host_ns: int) -> float:
        return self._high + abs(host_ns - self._high_since) * DRIFT
