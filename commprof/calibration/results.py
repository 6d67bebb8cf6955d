"""What a calibration measured, and what it says of other operations. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commprof.calibration.bandwidths import bus_factor, calibrated_op
from commprof.calibration.fit import Fit, Prediction, fit


@dataclass(frozen=True, slots=True)
class Timing:
    """One operation at one size, on the slowest rank: the median of its times, and the quartiles beside it.

    ``payload_bytes`` is S of nccl-tests. ``iterations`` were timed.
    """

    payload_bytes: int
    time_ns: int
    low_ns: int
    high_ns: int
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What one calibration measured, and on what.

    Attributes:
        created: the date and time, ISO 8601 with the offset to UTC.
        hosts: their names, each once.
        machine: what they are: ``system``, ``machine``, ``cpus``, ``accelerator`` (None for none).
        environment: the variables that a backend reads, as they were set.
        timings: of each operation, by size.
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
        """Latency and bandwidth of the operations whose times say them."""
        fits = {
            op: fit([t.payload_bytes for t in timings], [t.time_ns for t in timings])
            for op, timings in self.timings.items()
        }
        return {op: each for op, each in fits.items() if each is not None}

    def ceilings(self) -> Ceilings:
        """What to expect of an operation, from :meth:`fits`."""
        return Ceilings(self.world_size, self.fits())


class Ceilings:
    """The times that a machine can reach, by operation, size and size of the group."""

    def __init__(self, world_size: int, fits: Mapping[str, Fit]) -> None:
        self.world_size = world_size
        self._fits = fits

    def predict(self, op: str, payload_bytes: float, group_size: int) -> Prediction | None:
        """The time of ``op`` of that payload in a group of that size; None where nothing is known of it.

        In a group of another size than was calibrated the bus bandwidth is taken to be the same, and so is the latency.
        """
        name = calibrated_op(op)
        known, wanted = bus_factor(name, self.world_size), bus_factor(name, group_size)
        if name not in self._fits or known is None or wanted is None:
            return None
        return self._fits[name].predict(payload_bytes * wanted / known)
