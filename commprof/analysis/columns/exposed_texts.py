"""Exposed and overlapped time as text: a value, both bounds, or one bound. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from commprof.analysis.columns.units import format_ns

_EXPOSED = ("exposed_ns", "exposed_low_ns", "exposed_high_ns")


def exposed_time(row: Mapping[str, Any]) -> str | None:
    """Exposed time of ``row``, which has exposed_ns, exposed_low_ns and exposed_high_ns; None where nothing is known.

    >>> exposed_time({"exposed_ns": None, "exposed_low_ns": 3_100_000, "exposed_high_ns": 4_000_000})
    '3.10 ms to 4.00 ms (bounds)'
    """
    return _bounded([_number(row[name]) for name in _EXPOSED], _nanoseconds)


def exposed_share(row: Mapping[str, Any], duration: str = "step_ns") -> str | None:
    """The same as a part of the step that it was spent in, whose time is in the column ``duration``.

    >>> exposed_share({"exposed_ns": 25, "exposed_low_ns": 25, "exposed_high_ns": None, "step_ns": 100})
    '>= 25.0 %'
    """
    duration_ns = _number(row[duration])
    if not duration_ns:
        return None
    shares = [None if (part := _number(row[name])) is None else part / duration_ns for name in _EXPOSED]
    return _bounded(shares, _percent)


def overlapped_time(row: Mapping[str, Any]) -> str | None:
    """Overlapped time of ``row``, which has overlapped_ns and overlapped_at_most_ns; None where nothing is known.

    >>> overlapped_time({"overlapped_ns": None, "overlapped_at_most_ns": 2_000})
    '<= 2.00 us'
    """
    exact, most = _number(row["overlapped_ns"]), _number(row["overlapped_at_most_ns"])
    if exact is not None:
        return format_ns(round(exact))
    return None if most is None else f"<= {format_ns(round(most))}"


def _bounded(values: list[float | None], write: Callable[[float], str]) -> str | None:
    exact, low, high = values
    if low is None:
        return None
    if high is None:
        return f">= {write(low)}"
    if exact is not None or write(low) == write(high):
        return write(high)
    return f"{write(low)} to {write(high)} (bounds)"


def _nanoseconds(duration: float) -> str:
    return format_ns(round(duration))


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _number(value: Any) -> float | None:
    """A number of a frame or of plain values; None for what is missing."""
    return None if value is None or type(value).__name__ == "NAType" or value != value else float(value)
