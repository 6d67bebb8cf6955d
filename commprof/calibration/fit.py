"""Fits the latency and bandwidth of an operation to its times at several sizes. Uses only the standard library.

The model is Hockney's (Parallel Computing 20, 1994)::

    t(S) = alpha + S / beta

One fit spans times from microseconds to seconds, and the errors grow with the times. The fit therefore minimizes the
*relative* residuals. It is an iterated weighted least squares fit with weights 1 / t(S)^2, where t(S) is the time that
the model predicts. For a constant relative error these are the estimating equations of quasi-likelihood (McCullagh and
Nelder, Generalized Linear Models, chapter 9).

Huber's weights at 1.345 robust standard deviations reduce the weight of outlying sizes. The latency is never negative:
if the fit would make the latency negative, it is set to 0 and only beta is fitted. The intervals use Student's t and
the covariance of M-estimators (Huber, Robust Statistics, section 7.6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from commprof.quantiles import student_t

LEAST_SIZES: Final = 3
_HUBER: Final = 1.345
_SIGMA_OF_MAD: Final = 1.4826
_ROUNDS: Final = 60
_FLOOR: Final = 1e-9  # the least relative scale, so that exact times do not give a scale of 0


class Interval(NamedTuple):
    """A 95 % interval. An end without a bound is None."""

    low: float | None
    high: float | None


class Prediction(NamedTuple):
    """The predicted time of an operation in ns, with the 95 % prediction interval of one more measurement."""

    time_ns: float
    low_ns: float
    high_ns: float


class Fit(NamedTuple):
    """A fitted model ``t(S) = alpha_ns + slope * S``.

    Attributes:
        alpha_ns: The latency in ns, 0 or more.
        slope: The time per byte in ns, above 0.
        residual: The robust standard deviation of the relative residuals, for example 0.1 for 10 %.
        covariance: The covariances of alpha and slope: (alpha alpha, alpha slope, slope slope).
        sizes: The number of fitted sizes.
    """

    alpha_ns: float
    slope: float
    residual: float
    covariance: tuple[float, float, float]
    sizes: int

    @property
    def beta_bytes_per_s(self) -> float:
        """The bandwidth of large messages in bytes/s: the limit of algbw as S grows."""
        return 1e9 / self.slope

    @property
    def quantile(self) -> float:
        """The quantile of Student's t for the degrees of freedom of the fit."""
        return student_t(self.sizes - 2)

    def alpha_interval(self) -> Interval:
        """Return the 95 % interval of the latency in ns."""
        reach = self.quantile * math.sqrt(self.covariance[0])
        return Interval(max(0.0, self.alpha_ns - reach), self.alpha_ns + reach)

    def beta_interval(self) -> Interval:
        """Return the 95 % interval of the bandwidth in bytes/s. Its upper end is None if the times do not bound it."""
        reach = self.quantile * math.sqrt(self.covariance[2])
        low = 1e9 / (self.slope + reach)
        return Interval(low, 1e9 / (self.slope - reach) if reach < self.slope else None)

    def predict(self, payload_bytes: float) -> Prediction:
        """Return the predicted time of ``payload_bytes``. The low end of its interval is never less than 0."""
        time = self.alpha_ns + self.slope * payload_bytes
        var_alpha, cov, var_slope = self.covariance
        variance = var_alpha + 2 * cov * payload_bytes + var_slope * payload_bytes**2
        reach = self.quantile * math.sqrt(max(0.0, variance) + (self.residual * time) ** 2)
        return Prediction(time, max(0.0, time - reach), time + reach)


def fit(sizes: Sequence[float], times_ns: Sequence[float]) -> Fit | None:
    """Fit latency and bandwidth to the times ``times_ns`` of the payloads ``sizes`` (bytes, above 0).

    Return None if there are fewer than 3 distinct sizes, or if the times do not grow with the size.
    """
    points = [(float(s), float(t)) for s, t in zip(sizes, times_ns, strict=True) if s > 0 and t > 0]
    if len({size for size, _ in points}) < LEAST_SIZES:
        return None
    weights = [1 / time**2 for _, time in points]
    alpha, slope = _solve(points, weights)
    for _ in range(_ROUNDS):
        if slope <= 0:
            return None
        predicted = [alpha + slope * size for size, _ in points]
        scale = _scale(points, predicted)
        huber = [
            min(1.0, _HUBER * scale / max(abs(time / model - 1), 1e-300))
            for (_, time), model in zip(points, predicted, strict=True)
        ]
        weights = [h / model**2 for h, model in zip(huber, predicted, strict=True)]
        before = alpha, slope
        alpha, slope = _solve(points, weights)
        if math.isclose(slope, before[1], rel_tol=1e-12) and abs(alpha - before[0]) <= 1e-12 * (1 + alpha):
            break
    return _finished(points, alpha, slope) if slope > 0 else None


def _solve(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Return alpha and slope of a weighted least squares fit with ``alpha >= 0``."""
    total = sum(weights)
    mean_size = sum(w * s for w, (s, _) in zip(weights, points, strict=True)) / total
    mean_time = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (s - mean_size) ** 2 for w, (s, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (s - mean_size) * (t - mean_time) for w, (s, t) in zip(weights, points, strict=True)) / spread
    )
    alpha = mean_time - slope * mean_size
    if alpha >= 0:
        return alpha, slope
    squares = sum(w * s * s for w, (s, _) in zip(weights, points, strict=True))
    return 0.0, sum(w * s * t for w, (s, t) in zip(weights, points, strict=True)) / squares


def _scale(points: Sequence[tuple[float, float]], predicted: Sequence[float]) -> float:
    """Return the robust standard deviation of the relative residuals. The fit uses two degrees of freedom."""
    sizes = sorted(abs(time / model - 1) for (_, time), model in zip(points, predicted, strict=True))
    return max(_FLOOR, _SIGMA_OF_MAD * median(sizes[min(2, len(sizes) - 1) :]))


def _finished(points: Sequence[tuple[float, float]], alpha: float, slope: float) -> Fit:
    predicted = [alpha + slope * size for size, _ in points]
    residuals = [time / model - 1 for (_, time), model in zip(points, predicted, strict=True)]
    scale, count = _scale(points, predicted), len(points)
    limit = _HUBER * scale
    clipped = [max(-limit, min(limit, residual)) for residual in residuals]
    inside = sum(abs(residual) <= limit for residual in residuals) / count
    # Huber's correction for few points, K = 1 + p/n (1 - m)/m.
    correction = 1 + 2 / count * (1 - inside) / max(inside, 1 / count)
    variance = correction**2 * sum(c * c for c in clipped) / max(1, count - 2) / max(inside, 1 / count) ** 2
    variance = max(variance, _FLOOR**2)
    return Fit(alpha, slope, scale, _covariance(points, predicted, variance), count)


def _covariance(
    points: Sequence[tuple[float, float]], predicted: Sequence[float], variance: float
) -> tuple[float, float, float]:
    weights = [1 / model**2 for model in predicted]
    ones = sum(weights)
    first = sum(w * s for w, (s, _) in zip(weights, points, strict=True))
    second = sum(w * s * s for w, (s, _) in zip(weights, points, strict=True))
    determinant = ones * second - first * first
    return variance * second / determinant, -variance * first / determinant, variance * ones / determinant
