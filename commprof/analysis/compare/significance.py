"""A test whether the step times of two settings differ by more than their repeats. Pure.

Repeats of one setting vary, so even two equal settings have different step times. A difference is measurable if Welch's
t-test over the medians of the repeats gives a probability below 5 %, with Holm's correction over all pairs. With this
correction, a sweep of equal settings reports no difference in 95 % of the cases. One repeat does not show how runs
vary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import inf, sqrt
from statistics import fmean, variance
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis.columns.frames import from_rows
from commprof.analysis.columns.setting_answers import STEP_TIME_PAIRS
from commprof.quantiles import t_quantile, t_tail

LEVEL: Final = 0.05
LEAST_REPEATS: Final = 2
SHORTER: Final = "shorter"
LONGER: Final = "longer"
SAME: Final = "no measurable difference"
CANNOT_TELL: Final = "cannot tell"


class Difference(NamedTuple):
    """The mean of the second sample minus the mean of the first, its 95 % interval, and its probability by chance."""

    value: float
    low: float
    high: float
    probability: float


def welch(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return Welch's t-test of two samples with at least two values each.

    Source: Welch 1947, with degrees of freedom by Satterthwaite.
    """
    mean_variances = [variance(values) / len(values) for values in (first, second)]
    value, error = fmean(second) - fmean(first), sqrt(sum(mean_variances))
    if error == 0:
        return Difference(value, value, value, 1.0 if value == 0 else 0.0)
    spread = sum(
        part**2 / (len(values) - 1)
        for part, values in zip(mean_variances, (first, second), strict=True)
        if part
    )
    degrees = sum(mean_variances) ** 2 / spread
    reach = t_quantile(degrees) * error
    return Difference(value, value - reach, value + reach, t_tail(abs(value) / error, degrees))


def holm(probabilities: Sequence[float]) -> list[float]:
    """Return the probabilities of several tests, corrected for the number of tests (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, least = [0.0] * len(probabilities), 0.0
    order = sorted(range(len(probabilities)), key=lambda i: probabilities[i])
    for place, i in enumerate(order):
        least = max(least, min(1.0, probabilities[i] * (len(order) - place)))
        corrected[i] = least
    return corrected


def pairs(medians: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Compare the step times of each pair of settings (:data:`setting_answers.STEP_TIME_PAIRS`).

    Args:
        medians: The median step times in ns of the runs of each setting, by label. Runs without step times are left
            out.
    """
    rows: list[dict[str, Any]] = []
    tested: list[dict[str, Any]] = []
    for label, other in combinations(sorted(medians), 2):
        row: dict[str, Any] = {"label": label, "other": other, "verdict": CANNOT_TELL}
        rows.append(row)
        few = [name for name in (label, other) if len(medians[name]) < LEAST_REPEATS]
        if few:
            row["reason"] = (
                f"{_repeats(len(medians[few[0]]))} of {few[0]}; at least {LEAST_REPEATS} show how runs vary"
            )
            if all(medians[name] for name in (label, other)):
                row["difference_ns"] = round(fmean(medians[other]) - fmean(medians[label]))
            continue
        difference = welch(medians[label], medians[other])
        row |= {
            "difference_ns": round(difference.value),
            "low_ns": _rounded(difference.low),
            "high_ns": _rounded(difference.high),
            "probability": difference.probability,
        }
        tested.append(row)
    for row, probability in zip(tested, holm([row["probability"] for row in tested]), strict=True):
        row["probability"] = probability
        row["verdict"] = (
            SAME
            if probability >= LEVEL or not row["difference_ns"]
            else LONGER
            if row["difference_ns"] > 0
            else SHORTER
        )
    return from_rows(rows, STEP_TIME_PAIRS.columns)


def _repeats(count: int) -> str:
    return {0: "no step time", 1: "1 repeat"}.get(count, f"{count} repeats")


def _rounded(value: float) -> int | None:
    return None if abs(value) == inf else round(value)
