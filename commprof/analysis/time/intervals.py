"""95 % intervals of step times, without distributional assumptions over steps and with few over repeats."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

from commprof.quantiles import student_t


class Interval(NamedTuple):
    """A time in ns with its 95 % interval.

    ``over`` says what varies: ``repeats`` (runs of one setting), ``steps`` (of one run), or None where there is too
    little to tell; ``low`` and ``high`` are None then.
    """

    center: int | None
    low: int | None
    high: int | None
    over: str | None


def order_statistic_rank(count: int) -> int | None:
    """The largest k for which the k-th smallest and k-th largest of ``count`` values enclose the median with 95 %.

    The number of values below the median is binomial(count, 1/2); the interval misses with probability
    2 P(X < k). None below 6 values, where even the extremes enclose it less often.
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
    """Median of the steps of one run, with the interval between order statistics.

    Steps of one run are not independent, so this says how steady the run was, not how well it repeats.
    """
    if not durations:
        return Interval(None, None, None, None)
    ordered = sorted(durations)
    center = round(median(ordered))
    # Beyond some thousand steps the normal approximation is exact enough, and comb() would be slow.
    rank = order_statistic_rank(len(ordered)) if len(ordered) <= 2000 else _normal_rank(len(ordered))
    if rank is None:
        return Interval(center, None, None, None)
    return Interval(center, ordered[rank - 1], ordered[-rank], "steps")


def _normal_rank(count: int) -> int:
    """Normal approximation to :func:`order_statistic_rank`."""
    return int(count / 2 - NormalDist().inv_cdf(0.975) * sqrt(count) / 2)


def over_repeats(durations: Sequence[Sequence[int]]) -> Interval:
    """Step time of one setting from the step durations of each of its runs.

    Two or more runs: the mean of their medians, with a t-interval (not below 0). One run: :func:`over_steps`.
    """
    medians = [median(run) for run in durations if run]
    if len(medians) < 2:
        return over_steps(next((run for run in durations if run), ()))
    center = fmean(medians)
    reach = student_t(len(medians) - 1) * stdev(medians) / sqrt(len(medians))
    return Interval(round(center), max(0, round(center - reach)), round(center + reach), "repeats")
