"""Bounds of the offset between the clocks of a device and of the host. Pure arithmetic.

The host time at which a device reaches a mark is not known. But the device reaches it after the host enqueued it, after the
last query that found it not reached, and before the first query that found it reached. Each of these bounds the offset from
one side. The tightest bounds count, and are loosened with time, because clocks drift.
"""

from __future__ import annotations

from typing import Final

# How fast two clocks of one machine part at most. Crystals are specified to 50 millionths or less, each.
DRIFT: Final = 100e-6


class _Bound:
    """The tightest of several lower bounds of a difference that drifts."""

    def __init__(self) -> None:
        self.value = 0.0
        self.since = 0
        self.known = False

    def at(self, host_ns: int) -> float:
        """The bound as it is worth at ``host_ns``."""
        return self.value - abs(host_ns - self.since) * DRIFT

    def tighten(self, value: float, host_ns: int) -> None:
        """Take ``value``, found at ``host_ns``, if it says more."""
        if not self.known or value >= self.at(host_ns):
            self.value, self.since, self.known = value, host_ns, True


class DeviceClock:
    """Converts times of a device to times of the host.

    Device times are nanoseconds on an axis of the caller's choice.
    """

    def __init__(self) -> None:
        self._low = _Bound()
        self._high = _Bound()  # of the negative difference

    def reached_after(self, device_ns: float, host_ns: int) -> None:
        """The device was at ``device_ns`` at ``host_ns`` of the host or later."""
        self._low.tighten(host_ns - device_ns, host_ns)
        self._reconcile(self._high, self._low, host_ns)

    def reached_before(self, device_ns: float, host_ns: int) -> None:
        """The device was at ``device_ns`` at ``host_ns`` of the host or earlier."""
        self._high.tighten(device_ns - host_ns, host_ns)
        self._reconcile(self._low, self._high, host_ns)

    @staticmethod
    def _reconcile(older: _Bound, newer: _Bound, host_ns: int) -> None:
        """Where the bounds exclude each other the clocks part faster than assumed: only the new one is believed."""
        if older.known and older.at(host_ns) > -newer.at(host_ns):
            older.known = False

    def host_time(self, device_ns: float, now_ns: int) -> int | None:
        """The host's time at ``device_ns``, as known at ``now_ns``: the middle of what is possible; None without bounds."""
        if self._low.known and self._high.known:
            return round(device_ns + (self._low.at(now_ns) - self._high.at(now_ns)) / 2)
        if self._low.known:
            return round(device_ns + self._low.value)
        return round(device_ns - self._high.value) if self._high.known else None

    def error_ns(self, now_ns: int) -> int | None:
        """How far :meth:`host_time` may be off; None while only one side is bounded."""
        if not (self._low.known and self._high.known):
            return None
        return round((-self._high.at(now_ns) - self._low.at(now_ns)) / 2)
