"""The results of a calibration, and predictions from these results. Uses only the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commprof.calibration.bandwidths import bus_factor, calibrated_op
from commprof.calibration.fit import Fit, Prediction, fit


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one operation at one size, on the slowest rank.

    Attributes:
        payload_bytes: The payload in bytes (S of nccl-tests).
        time_ns: The median time in ns.
        low_ns, high_ns: The lower and upper quartile of the times in ns.
        iterations: The number of timed iterations.
    """

    payload_bytes: int
    time_ns: int
    low_ns: int
    high_ns: int
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The results of one calibration, with a description of the machine.

    Attributes:
        created: The date and time, in ISO 8601 format with the offset to UTC.
        hosts: The distinct host names.
        machine: A description of the host of the first rank, with the keys ``system``, ``machine``, ``cpus`` and
            ``accelerator``. The accelerator is None if the calibration does not use a GPU.
        environment: The environment variables that a backend reads.
        warmup: The number of untimed iterations before the timed ones.
        timings: The times of each operation, in order of size.
        skipped: For each operation that was left out, at all sizes or from some size on, the reason.
    """

    created: str
    torch: str
    backend: str
    backend_version: str | None
    device: str
    dtype: str
    world_size: int
    hosts: tuple[str, ...]
    machine: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    warmup: int = 0
    timings: Mapping[str, tuple[Timing, ...]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def fits(self) -> dict[str, Fit]:
        """Return the fitted latency and bandwidth of each operation whose times determine them."""
        fits = {
            op: fit([t.payload_bytes for t in timings], [t.time_ns for t in timings])
            for op, timings in self.timings.items()
        }
        return {op: each for op, each in fits.items() if each is not None}

    def ceilings(self) -> Ceilings:
        """Return an object that predicts times from :meth:`fits`."""
        return Ceilings(self.world_size, self.fits())


class Ceilings:
    """Predicts the time that a machine can reach for an operation, a payload and a group size."""

    def __init__(self, world_size: int, fits: Mapping[str, Fit]) -> None:
        self.world_size = world_size
        self._fits = fits

    def predict(self, op: str, payload_bytes: float, group_size: int) -> Prediction | None:
        """Return the predicted time of ``op``, or None if the calibration cannot predict this operation.

        If ``group_size`` differs from the calibrated number of ranks, the bus bandwidth and the latency are assumed to
        be the same.
        """
        name = calibrated_op(op)
        known, wanted = bus_factor(name, self.world_size), bus_factor(name, group_size)
        if name not in self._fits or known is None or wanted is None:
            return None
        return self._fits[name].predict(payload_bytes * wanted / known)
