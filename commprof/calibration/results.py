"""The results of a calibration, and predictions from them. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commprof.calibration.bandwidths import bus_factor, calibrated_op
from commprof.calibration.fit import Fit, Prediction, fit


@dataclass(frozen=True, slots=True)
class Timing:
    """One operation at one size, on the slowest rank: median and quartiles of its times.

    ``payload_bytes`` is S of nccl-tests. ``iterations`` were timed.
    """

    payload_bytes: int
    time_ns: int
    low_ns: int
    high_ns: int
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The results of one calibration, and the machine.

    Attributes:
        created: the date and time, ISO 8601 with the offset to UTC.
        hosts: the distinct host names.
        machine: their description: ``system``, ``machine``, ``cpus``, ``accelerator`` (None for none).
        environment: the environment variables that a backend reads.
        timings: the times of each operation, by size.
        skipped: why an operation was left out.
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
        """Latency and bandwidth of the operations whose times determine them."""
        fits = {
            op: fit([t.payload_bytes for t in timings], [t.time_ns for t in timings])
            for op, timings in self.timings.items()
        }
        return {op: each for op, each in fits.items() if each is not None}

    def ceilings(self) -> Ceilings:
        """Predictions from :meth:`fits`."""
        return Ceilings(self.world_size, self.fits())


class Ceilings:
    """The times that a machine can reach, by operation, size and size of the group."""

    def __init__(self, world_size: int, fits: Mapping[str, Fit]) -> None:
        self.world_size = world_size
        self._fits = fits

    def predict(self, op: str, payload_bytes: float, group_size: int) -> Prediction | None:
        """The time of ``op`` of that payload in a group of that size; None if not known.

        For a group of another size, bus bandwidth and latency are assumed to be equal.
        """
        name = calibrated_op(op)
        known, wanted = bus_factor(name, self.world_size), bus_factor(name, group_size)
        if name not in self._fits or known is None or wanted is None:
            return None
        return self._fits[name].predict(payload_bytes * wanted / known)
