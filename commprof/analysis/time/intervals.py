"""Compute 95 % intervals of step times.

Intervals over steps assume no distribution. Intervals over repeats make few assumptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

from commprof.quantiles import student_t


class Interval(NamedTuple):
    """A time in ns with its 95 % interval.

    ``over`` is the source of the variation: ``repeats`` (runs of one setting) or ``steps`` (of one run). If
    there are too few values for an interval, ``over``, ``low`` and ``high`` are None.
    """

    center: int | None
    low: int | None
    high: int | None
    over: str | None


def order_statistic_rank(count: int) -> int | None:
    """Return the largest k for which the k-th smallest and k-th largest values enclose the median with 95 %.

    The number of values below the median is binomial(count, 1/2). The interval misses the median with
    probability 2 P(X < k). The result is None for fewer than 6 values, because even the extremes enclose the
    median with less than 95 %.

    Args:
        count: The number of values.
    """
    missed, rank = 0, 0
    total = 2**count
    for below in range(count // 2):
        missed += comb(count, below)
        if 2 * missed * 20 > total:
            break
        rank = below + 1
    return rank or None


def over_steps(durations: Sequence[int]) -> Interval:
    """Return the median of the steps of one run, with the interval between order statistics.

    Steps of one run are not independent. The interval therefore describes how steady the run was, not how
    well it repeats.
    """
    if not durations:
        return Interval(None, None, None, None)
    ordered = sorted(durations)
    center = round(median(ordered))
    # Beyond about two thousand steps, the normal approximation is accurate enough, and comb() would be slow.
    rank = order_statistic_rank(len(ordered)) if len(ordered) <= 2000 else _normal_rank(len(ordered))
    if rank is None:
        return Interval(center, None, None, None)
    return Interval(center, ordered[rank - 1], ordered[-rank], "steps")


def _normal_rank(count: int) -> int:
    """Return the normal approximation to :func:`order_statistic_rank`."""
    return int(count / 2 - NormalDist().inv_cdf(0.975) * sqrt(count) / 2)


def over_repeats(durations: Sequence[Sequence[int]]) -> Interval:
    """Return the step time of one setting from the step durations of each of its runs.

    For two or more runs, the result is the mean of their medians, with a t-interval (not below 0). For one
    run, the result is :func:`over_steps`.
    """
    medians = [median(run) for run in durations if run]
    if len(medians) < 2:
        return over_steps(next((run for run in durations if run), ()))
    center = fmean(medians)
    reach = student_t(len(medians) - 1) * stdev(medians) / sqrt(len(medians))
    return Interval(round(center), max(0, round(center - reach)), round(center + reach), "repeats")
