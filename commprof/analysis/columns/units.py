"""Formats bytes and nanoseconds for people. Tables keep integers; only text and charts use this module."""

from __future__ import annotations

from typing import Final

_BYTE_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")
_TIME_UNITS: Final = ((1_000, "ns"), (1_000_000, "us"), (1_000_000_000, "ms"))


def _three_digits(value: float) -> str:
    """``value`` below 1024 with three significant digits, never in exponents."""
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"


def format_bytes(count: float) -> str:
    """Bytes with a binary unit and three significant digits; below 1 KiB as they are.

    >>> format_bytes(0), format_bytes(1023), format_bytes(1572864), format_bytes(2.5), format_bytes(-2048)
    ('0 B', '1023 B', '1.50 MiB', '2.50 B', '-2.00 KiB')
    """
    if abs(count) < 1024:
        return f"{int(count)} B" if count == int(count) else f"{_three_digits(count)} B"
    value, power = float(count) / 1024, 0
    # 1023.6 KiB would print as 1024 KiB.
    while abs(value) >= 1023.5 and power + 1 < len(_BYTE_UNITS):
        value, power = value / 1024, power + 1
    return f"{_three_digits(value)} {_BYTE_UNITS[power]}"


def format_ns(duration: float) -> str:
    """Nanoseconds as ns, us, ms, s, or minutes and hours from 100 s on.

    >>> format_ns(850), format_ns(12_300_000), format_ns(1_500_000_000), format_ns(3_725_000_000_000)
    ('850 ns', '12.3 ms', '1.50 s', '1 h 02 min')
    """
    size = abs(duration)
    if size < 1_000 and duration == int(duration):
        return f"{int(duration)} ns"
    divisor = 1
    for limit, unit in _TIME_UNITS:
        if size < limit * 0.9995:
            return f"{_three_digits(duration / divisor)} {unit}"
        divisor = limit
    seconds = duration / 1e9
    if abs(seconds) < 99.95:
        return f"{_three_digits(seconds)} s"
    sign, whole_seconds = "-" if seconds < 0 else "", round(abs(seconds))
    if whole_seconds < 3600:
        return f"{sign}{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    minutes = round(whole_seconds / 60)
    return f"{sign}{minutes // 60} h {minutes % 60:02d} min"
