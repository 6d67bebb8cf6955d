"""Test durations and rates in the forms that people write."""

from __future__ import annotations

import pytest

from commprof.quantities import bytes_per_second, duration_ns


@pytest.mark.parametrize(
    ("text", "ns"),
    [("50us", 50_000), ("1.5s", 1_500_000_000), (" 2 min ", 120_000_000_000), ("7ns", 7), ("0ms", 0)],
)
def test_durations(text, ns):
    assert duration_ns(text) == ns


@pytest.mark.parametrize("text", ["", "50", "us", "-1ms", "1e3ms", "nan s", "5 hours", "9" * 400 + "s"])
def test_what_is_no_duration(text):
    assert duration_ns(text) is None


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("450GB/s", 450e9), ("400Gbit/s", 50e9), ("10Gbit", 1.25e9), ("1GiB/s", 2**30), ("8bit", 1.0), ("1e3 kB/s", 1e6),
        ("200mbit", 25e6),
    ],
)  # fmt: skip
def test_rates(text, rate):
    assert bytes_per_second(text) == rate


# A lower-case b means bit to some users and byte to others, which is a factor of 8.
@pytest.mark.parametrize(
    "text", ["10Gb/s", "10gb/s", "10GB", "0GB/s", "-1GB/s", "1e30TB/s", "", "fast", "10 GBps"]
)
def test_what_is_no_rate_or_may_be_two(text):
    assert bytes_per_second(text) is None
