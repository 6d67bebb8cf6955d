"""Builds axes with readable ticks: bytes in powers of 1024, times in ns to s, counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

_MOST_STEP_TICKS: Final = 12
_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_TIMES: Final = ((1, "ns"), (1_000, "us"), (1_000_000, "ms"), (1_000_000_000, "s"))


def step_ticks(steps: Iterable[float]) -> dict[str, Any]:
    """Return the ticks of an axis of training steps, at whole steps only. If there are few steps, each has a tick."""
    numbers = list(steps)
    # An axis around a single step would also have ticks at the neighboring steps.
    if len(set(numbers)) == 1:
        return {"tickvals": numbers[:1], "ticktext": [f"{numbers[0]:.0f}"]}
    few = not numbers or max(numbers) - min(numbers) <= _MOST_STEP_TICKS
    return {"tickformat": "d", **({"dtick": 1} if few else {"nticks": _MOST_STEP_TICKS})}


def step_size(highest: float, count: int = 4) -> float:
    """Return a round step that divides ``0..highest`` into about ``count`` parts.

    The step is 1, 2, 2.5 or 5 times a power of ten.
    """
    rough = max(highest, 1e-300) / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step for step in _STEPS if rough <= step * power * (1 + 1e-9)) * power


def ticks(highest: float, unit: float, name: str, count: int = 4) -> tuple[list[float], list[str]]:
    """Return the values and texts of ticks from 0 to ``highest``, as multiples of ``unit``, whose name is ``name``."""
    step = step_size(highest / unit, count)
    numbers = [step * i for i in range(math.floor(highest / unit / step + 1e-9) + 1)]
    digits = max(0, -math.floor(math.log10(step))) if step < 1 else 0
    digits += 1 if not math.isclose(step, round(step, digits), rel_tol=1e-9) else 0
    return [number * unit for number in numbers], [
        f"{number:,.{digits}f} {name}".strip() if number else "0" for number in numbers
    ]


def bytes_ticks(highest: float, count: int = 4) -> tuple[list[float], list[str]]:
    """Return ticks for bytes: ``0, 2 MiB, 4 MiB``."""
    index = min(len(_BINARY) - 1, int(math.log(max(highest, 1.0), 1024)))
    return ticks(highest, 1024.0**index, _BINARY[index], count)


def time_ticks(highest: float, count: int = 4) -> tuple[list[float], list[str]]:
    """Return ticks for nanoseconds: ``0, 20 ms, 40 ms``."""
    unit, name = max((u for u in _TIMES if u[0] <= max(highest, 1)), default=_TIMES[0])
    return ticks(highest, float(unit), name, count)


def count_ticks(highest: float, count: int = 4) -> tuple[list[float], list[str]]:
    """Return ticks for counts: ``0, 10, 20``."""
    return ticks(highest, 1.0, "", count)


TICKS: Final[dict[str, Callable[..., tuple[list[float], list[str]]]]] = {
    "bytes": bytes_ticks,
    "ns": time_ticks,
    "": count_ticks,
}


def axis(highest: float, unit: str, title: str, room: float = 1.0, count: int = 4) -> dict[str, Any]:
    """Return a plotly axis from 0 to ``room`` times ``highest``.

    The axis has readable ticks of ``unit`` (bytes, ns or a plain count).
    """
    highest = highest if highest > 0 and math.isfinite(highest) else 1.0
    values, texts = TICKS[unit](highest, count)
    return {
        "range": [0, highest * room],
        "tickvals": values,
        "ticktext": texts,
        "title": {"text": title},
        "rangemode": "tozero",
    }


def log_axis(low: float, high: float, title: str, suffix: str = "", count: int = 7) -> dict[str, Any]:
    """Return a logarithmic plotly axis for bytes, with ticks at powers of two.

    With the suffix ``/s``, the axis shows rates in bytes per second.
    """
    low = max(low, 1e-3)
    high = max(high, low)
    if high < 2 * low:  # values that are nearly equal are in the middle of the axis
        low, high = low / 2, high * 2
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    least = -(-(last - first) // count)
    step = next((step for step in (1, 2, 5, 10, 20, 40, 80) if step >= least), least)
    powers = [power for power in range(first, last + 1) if power % step == 0]
    room = 0.04 * (math.log10(high) - math.log10(low))
    return {
        "type": "log",
        "range": [math.log10(low) - room, math.log10(high) + room],
        "tickvals": [2.0**power for power in powers],
        "ticktext": [f"{_power_of_two(power)}{suffix}" for power in powers],
        "title": {"text": title},
    }


def _power_of_two(power: int) -> str:
    if power < 0:
        return f"{2.0**power:.2g} B"
    index = min(len(_BINARY) - 1, power // 10)
    return f"{2 ** (power - 10 * index):,} {_BINARY[index]}"
