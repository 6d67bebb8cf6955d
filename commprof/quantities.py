"""Parsers for durations and rates in options. Standard library only."""

from __future__ import annotations

import re
from typing import Final

_TIMES: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "min": 60_000_000_000}
_DURATION: Final = re.compile(r"\s*(\d{1,15}(?:\.\d+)?)\s*(ns|us|ms|s|min)\s*")
_PREFIXES: Final = {"": 1e0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
# Gb/s is not accepted, because it means gigabits to some people and gigabytes to others.
_RATE: Final = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*((?:[kKmMgG]i?|[tT])?)(bit(?:/s)?|B/s)\s*")


def duration_ns(text: str) -> int | None:
    """Return the duration in ``text`` in nanoseconds; None if ``text`` is not a duration.

    >>> duration_ns("900ms"), duration_ns("1.5 s"), duration_ns("900")
    (900000000, 1500000000, None)
    """
    match = _DURATION.fullmatch(text)
    return round(float(match[1]) * _TIMES[match[2]]) if match else None


def bytes_per_second(text: str) -> float | None:
    """Return the rate in ``text`` in bytes per second; None if ``text`` is not a rate greater than 0 (and below 1e18).

    >>> bytes_per_second("1.25GB/s"), bytes_per_second("10Gbit"), bytes_per_second("400 Gbit/s"), bytes_per_second("10Gb/s")
    (1250000000.0, 1250000000.0, 50000000000.0, None)
    """
    match = _RATE.fullmatch(text)
    if match is None:
        return None
    rate = float(match[1]) * _PREFIXES[match[2].lower()] / (1 if match[3] == "B/s" else 8)
    return rate if 0 < rate < 1e18 else None
