"""Quantiles of Student's t, for intervals from few values. Standard library only."""

from __future__ import annotations

from statistics import NormalDist
from typing import Final

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T_975: Final = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
)


def student_t(degrees: int) -> float:
    """The 0.975 quantile of Student's t; past 20 degrees by the expansion of Abramowitz and Stegun 26.7.5."""
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
