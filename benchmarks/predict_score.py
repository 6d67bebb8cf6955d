"""Scores the predictions of benchmarks/predict.py: the targets, and the table by engine and class of change.

A row is a predicted and measured setting. It has the keys ``engine``, ``kind`` (the class of change), ``base`` (a name
for the recorded runs that the prediction is based on), ``measured_ns``, ``noise``, ``predicted_ns``, ``error`` and
``inside`` (whether the measured value is inside the 80 % interval).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any, Final

import numpy as np

UNCHANGED: Final = "none: further runs of the recorded setting"
BESIDE: Final = "real compute"  # the end of the name of a class that is shown for comparison but not scored
HEADER: Final = ("engine", "change", "settings", "median error", "largest", "in the 80 % interval", "noise")
MEDIAN, TIMES_NOISE, TWICE = 0.05, 1.5, 2.0
INTERVAL: Final = (0.7, 0.9)
ORDER: Final = 0.95
Row = Mapping[str, Any]


def is_scored(row: Row) -> bool:
    """Return whether ``row`` counts for the targets.

    All changes count, except changes of the number of ranks with real compute.
    """
    return row["kind"] != UNCHANGED and not row["kind"].endswith(BESIDE)


def right_order(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the number of pairs whose order is predicted correctly, and the number of all pairs.

    A pair consists of two settings that are predicted from the same recorded runs and differ measurably.
    """
    right = pairs = 0
    for a, b in combinations([row for row in rows if not row["kind"].endswith(BESIDE)], 2):
        apart = abs(a["measured_ns"] / b["measured_ns"] - 1)
        if a["base"] == b["base"] and apart > 2 * max(a["noise"], b["noise"], 0.01):
            pairs += 1
            right += (a["measured_ns"] < b["measured_ns"]) == (a["predicted_ns"] < b["predicted_ns"])
    return right, pairs


def bars(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the four targets, each with its ``value``, its ``text`` and whether it is ``met``.

    Without a scored row, the result is empty.
    """
    scored = [row for row in rows if is_scored(row)]
    if not scored:
        return {}
    errors = [abs(row["error"]) for row in scored]
    limit = max(MEDIAN, TIMES_NOISE * median(row["noise"] for row in scored))
    middle, high = float(np.median(errors)), float(np.percentile(errors, 90))
    held = sum(row["inside"] for row in scored) / len(scored)
    right, pairs = right_order(rows)
    return {
        "median error": _bar(middle, f"{percent(middle)}, at most {percent(limit)}", middle <= limit),
        "90th percentile": _bar(
            high, f"{percent(high)}, at most {percent(TWICE * limit)}", high <= TWICE * limit
        ),
        "80 % interval": _bar(
            held,
            f"holds {percent(held)} of {len(scored)}, expected {percent(INTERVAL[0])} to {percent(INTERVAL[1])}",
            INTERVAL[0] <= held <= INTERVAL[1],
        ),
        "order": _bar(
            right / pairs if pairs else None,
            f"right in {right} of {pairs} pairs, at least {percent(ORDER)}",
            bool(pairs) and right >= ORDER * pairs,
        ),
    }


def percent(value: float) -> str:
    """Return ``value`` as text in percent."""
    return f"{100 * value:.1f} %"


def _bar(value: float | None, text: str, met: bool) -> dict[str, Any]:
    return {"value": value, "text": f"{text}: {'met' if met else 'not met'}", "met": met}


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the rows of the table by engine and class of change.

    The rows of an engine are followed by a row for all its scored changes. The rows that are not scored come last.
    """
    lines = []
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    for engine in engines:
        own = [row for row in rows if row["engine"] == engine]
        kinds = sorted({row["kind"] for row in own if is_scored(row)})
        lines += [_line(engine, kind, [row for row in own if row["kind"] == kind]) for kind in kinds]
        lines += _lines_of_all(engine, own)
    if len(engines) > 1:
        lines += _lines_of_all("all", rows)
    beside = sorted({row["kind"] for row in rows if not is_scored(row)})
    for kind in beside:
        for engine in engines:
            chosen = [row for row in rows if row["engine"] == engine and row["kind"] == kind]
            lines += [_line(engine, kind, chosen)] if chosen else []
    return lines


def _lines_of_all(engine: str, rows: Sequence[Row]) -> list[list[str]]:
    scored = [row for row in rows if is_scored(row)]
    return [_line(engine, "all changes", scored)] if scored else []


def _line(engine: str, kind: str, rows: Sequence[Row]) -> list[str]:
    errors = [abs(row["error"]) for row in rows]
    return [
        engine,
        kind,
        str(len(rows)),
        percent(median(errors)),
        percent(max(errors)),
        f"{sum(row['inside'] for row in rows)} of {len(rows)}",
        percent(median(row["noise"] for row in rows)),
    ]
