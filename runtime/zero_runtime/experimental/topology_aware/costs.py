"""The cost of plain and composed collectives, computed from files of ``commprof calibrate`` without side effects.

The cost follows Hockney's model with the fitted parameters: t(S) = alpha + S / beta. Latency and bus
bandwidth are assumed to be the same for all group sizes, although one size was calibrated
(docs/calibration.md). Groups of one axis that share the links of a host divide the bandwidth of the host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.reduction import ALL_TO_ALL

FORMAT: Final = "commprof-calibration"
OPERATIONS: Final = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


class Cost(NamedTuple):
    """The cost of one operation.

    Attributes:
        alpha_ns: The latency in ns.
        bus_ns_per_byte: 1 / bus bandwidth in ns per byte, as nccl-tests defines bus bandwidth.
    """

    alpha_ns: float
    bus_ns_per_byte: float

    def time_ns(self, operation: str, payload: float, ranks: int) -> float:
        """Return the time in ns of ``payload`` bytes (S of nccl-tests) among ``ranks`` ranks."""
        return self.alpha_ns + payload * bus_factor(operation, ranks) * self.bus_ns_per_byte


def bus_factor(operation: str, ranks: int) -> float:
    """Return the ratio bus bandwidth / algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md)."""
    return 1.0 if operation == "reduce" else (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks


class Costs(NamedTuple):
    """The calibrated costs.

    Attributes:
        world: The cost of each operation among all ranks.
        axes: For each axis, the cost of each operation among the ranks of one group of the axis.
        sharing: For each axis, the number of its groups that share the links of one host.
    """

    world: Mapping[str, Cost]
    axes: Sequence[Mapping[str, Cost]]
    sharing: Sequence[int]

    def described(self) -> dict[str, Any]:
        """Return all costs as plain numbers, for the record of a run.

        Each operation has the two values of :class:`Cost`.
        """
        world, *axes = ({op: list(cost) for op, cost in table.items()} for table in (self.world, *self.axes))
        return {"world": world, "axes": axes, "sharing": list(self.sharing)}

    def plain_ns(self, operation: str, payload: float, sizes: Sequence[int], implementation: str) -> float:
        """Return the time in ns of the plain collective of ``payload`` bytes."""
        issued = _issued(operation, implementation)
        return self.world[issued].time_ns(issued, payload, prod(sizes))

    def composed_ns(self, operation: str, payload: float, sizes: Sequence[int], implementation: str) -> float:
        """Return the time in ns of the composed collective of ``payload`` bytes, which is the sum over its axes."""
        total, left = 0.0, payload
        for axis in range(len(sizes) - 1, -1, -1):
            halves = ("reduce_scatter", "all_gather") if operation == "all_reduce" else (operation,)
            for each in ("all_reduce",) if operation == "all_reduce" and axis == 0 else halves:
                issued = _issued(each, implementation)
                total += self.axes[axis][issued].time_ns(issued, left * self.sharing[axis], sizes[axis])
            left /= sizes[axis]
        return total


def _issued(operation: str, implementation: str) -> str:
    return "all_to_all" if operation == "reduce_scatter" and implementation == ALL_TO_ALL else operation


def read_costs(path: str, operations: Sequence[str] = OPERATIONS) -> dict[str, Cost]:
    """Return the cost of each operation in a file of ``commprof calibrate --out``.

    Raises:
        ConfigError: The file cannot be read, is not a calibration, or does not contain one of ``operations``.
    """
    key = "communication.calibration"
    try:
        content: Any = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{key}: {path} cannot be read: {error.strerror}; make it: commprof calibrate --out"
        ) from None
    except ValueError:
        content = None
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise ConfigError(f"{key}: {path} is no calibration; make one: commprof calibrate --out FILE")
    costs = {}
    for operation in operations:
        try:
            entry = content["ops"][operation]
            fit, factor = entry["fit"], entry["bus_factor"]
            cost = Cost(float(fit["alpha_ns"]), 1e9 / (float(fit["beta_bytes_per_s"]) * float(factor)))
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            raise ConfigError(
                f"{key}: {path} has no fitted times of {operation}; calibrate again, with this operation and 3 sizes or more"
            ) from None
        costs[operation] = cost
    return costs
