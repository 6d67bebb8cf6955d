"""Quantiles and tail probabilities of Student's t, for confidence intervals of few values. Standard library only."""

from __future__ import annotations

from math import ceil, exp, floor, isinf, lgamma, log, log1p
from statistics import NormalDist
from typing import Final

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T_975: Final = (
    12.7062,
    4.3027,
    3.1824,
    2.7764,
    2.5706,
    2.4469,
    2.3646,
    2.3060,
    2.2622,
    2.2281,
    2.2010,
    2.1788,
    2.1604,
    2.1448,
    2.1314,
    2.1199,
    2.1098,
    2.1009,
    2.0930,
    2.0860,
)


def student_t(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t.

    For more than 20 degrees of freedom, use the expansion of Abramowitz and Stegun 26.7.5.
    """
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def t_tail(t: float, degrees: float) -> float:
    """Return the probability that Student's t is farther from 0 than ``t``: the regularized incomplete beta function.

    The formula is Abramowitz and Stegun 26.7.1. ``degrees`` need not be an integer.

    >>> round(t_tail(12.7062, 1), 4), round(t_tail(2.2281, 10), 4), t_tail(0.0, 3)
    (0.05, 0.05, 1.0)
    """
    if t == 0:
        return 1.0
    if isinf(t):
        return 0.0
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def t_quantile(degrees: float) -> float:
    """Return the 0.975 quantile of Student's t, computed by bisection of :func:`t_tail`.

    ``degrees`` is at least 1 and need not be an integer.

    >>> round(t_quantile(1), 3), round(t_quantile(3), 3)
    (12.706, 3.182)
    """
    low, high = student_t(ceil(degrees)), student_t(floor(degrees))
    for _ in range(40 if high > low else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > 0.05 else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return I_x(a, b) by its continued fraction (Abramowitz and Stegun 26.5.8), on the side of fast convergence."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    numerator, denominator = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = denominator
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            denominator = 1 / (1 + term * denominator)
            numerator = 1 + term / numerator
            value *= denominator * numerator
        if abs(denominator * numerator - 1) < 1e-15:
            break
    return front * value
