"""Decides from measured costs which messages are sent along the axes of a grid (``communication.calibration``).

An operation on S bytes (as in nccl-tests) among n ranks takes alpha + S f(n) / B. f is the bus factor of nccl-tests:
2(n-1)/n for an all_reduce, and (n-1)/n for the other operations. A message is sent along the axes if the total time of
the operations along the axes is below the time of the plain collective. If several groups of one axis share a host's
links, the bytes are multiplied by the number of these groups. Alpha and B are from the files of
``commprof calibrate``, or from the values that the runtime published from these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.requested.config_keys import section
from commprof.requested.errors import UnsupportedError
from commprof.schema import Op

KEY: Final = "communication.calibration"
OPS: Final = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL)
BANDWIDTH_SHARE: Final = 0.9


class Cost(NamedTuple):
    """The latency of an operation in ns, and its time per byte in ns at a bus factor of 1."""

    alpha_ns: float
    bus_ns_per_byte: float


Table = Mapping[Op, Cost]


class Costs(NamedTuple):
    """The costs of all operations on a grid.

    Attributes:
        world: The costs among all ranks.
        axes: The costs among the ranks of a group, for each axis, outermost first.
        sharing: For each axis, the number of groups that share one host's links.
    """

    world: Table
    axes: Sequence[Table]
    sharing: Sequence[int]

    def goes_along(self, op: Op, payload_bytes: int, sizes: Sequence[int], *, exchanges: bool) -> bool:
        """Return whether a message is sent along the axes of a grid.

        Args:
            op: The intended operation: all_reduce, reduce_scatter or all_gather.
            payload_bytes: The payload of the full message in bytes.
            sizes: The number of ranks along each axis, outermost first.
            exchanges: Whether a reduce_scatter is issued as an all_to_all.
        """
        plain = _time_ns(self.world, op, payload_bytes, prod(sizes), exchanges)
        along, left = 0.0, float(payload_bytes)
        for axis in reversed(range(len(sizes))):
            operations = [op]
            if op == Op.ALL_REDUCE and axis:
                operations = [Op.REDUCE_SCATTER, Op.ALL_GATHER]
            for operation in operations:
                along += _time_ns(
                    self.axes[axis], operation, left * self.sharing[axis], sizes[axis], exchanges
                )
            left /= sizes[axis]
        return along < plain


def smallest_payload(cost: Cost, op: Op, ranks: int) -> float:
    """Return the bytes at which ``op`` reaches the share p = :data:`BANDWIDTH_SHARE` of its bandwidth.

    The result is p / (1 - p) alpha beta, where beta is the bandwidth.
    """
    share = BANDWIDTH_SHARE / (1 - BANDWIDTH_SHARE)
    return share * cost.alpha_ns / (_factor(op, ranks) * cost.bus_ns_per_byte)


def _factor(op: Op, ranks: int) -> float:
    return 1.0 if op == Op.REDUCE else (2 if op == Op.ALL_REDUCE else 1) * (ranks - 1) / ranks


def _time_ns(table: Table, op: Op, payload_bytes: float, ranks: int, exchanges: bool) -> float:
    issued = Op.ALL_TO_ALL if op == Op.REDUCE_SCATTER and exchanges else op
    cost = table[issued]
    return cost.alpha_ns + payload_bytes * _factor(issued, ranks) * cost.bus_ns_per_byte


def costs_of(
    config: Mapping[str, Any], sizes: Sequence[int], host_ranks: int | None, published: object = None
) -> Costs | None:
    """Return the costs that decide whether a message is sent along the axes.

    The result is None if no decision is needed, because either all messages or no messages are sent along the axes.

    Args:
        config: The full config.
        sizes: The number of ranks along each axis.
        host_ranks: The number of consecutive ranks on each host, or None if it is not known.
        published: The costs that a run has read and published. None reads the files.

    Raises:
        UnsupportedError: the costs cannot be determined.
    """
    files = section(config, "communication").get("calibration")
    if len(sizes) < 2 or not files:
        return None
    if published is not None:
        return _published_costs(published, len(sizes), files)
    paths = [files.get("world"), *(files.get("axes") or ())] if isinstance(files, Mapping) else []
    if len(paths) != len(sizes) + 1:
        reason = f"expected one file for all ranks and one file for each of the {len(sizes)} axes"
        raise UnsupportedError(KEY, files, reason)
    if host_ranks is None:
        raise UnsupportedError(KEY, files, "how many ranks share the links of a host is not known")
    world, *axes = (read_costs(str(path)) for path in paths)
    return Costs(world, axes, _sharing(sizes, host_ranks))


def _published_costs(published: object, axes: int, files: object) -> Costs:
    """Return the costs that a run published as ``world``, ``axes`` and ``sharing``, with two numbers per operation."""
    try:
        content: Any = published
        tables = [
            {op: Cost(*(float(each) for each in table[op])) for op in OPS}
            for table in (content["world"], *content["axes"])
        ]
        sharing = tuple(int(each) for each in content["sharing"])
    except (KeyError, TypeError, ValueError):
        raise UnsupportedError(KEY, files, "the costs that the run published are damaged") from None
    if len(tables) != axes + 1 or len(sharing) != axes:
        reason = f"the run published costs for {len(tables) - 1} axes, and it has {axes} axes"
        raise UnsupportedError(KEY, files, reason)
    return Costs(tables[0], tables[1:], sharing)


def read_costs(path: str, wanted: Sequence[Op] = OPS) -> Table:
    """Return the costs of the ``wanted`` operations from a file of ``commprof calibrate``.

    Raises:
        UnsupportedError: the file cannot be read here, or it has no fitted times for one of the operations.
    """
    try:
        ops = json.loads(Path(path).read_bytes())["ops"]
        costs = {}
        for op in wanted:
            fit, factor = ops[op]["fit"], float(ops[op]["bus_factor"])
            costs[op] = Cost(float(fit["alpha_ns"]), 1e9 / (float(fit["beta_bytes_per_s"]) * factor))
    except OSError as error:
        raise UnsupportedError(KEY, path, f"it cannot be read here: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        needed = ", ".join(wanted)
        raise UnsupportedError(KEY, path, f"it has no fitted times of {needed}") from None
    return costs


def _sharing(sizes: Sequence[int], host_ranks: int) -> tuple[int, ...]:
    """Return for each axis the largest number of groups that have ranks on the same host."""
    most_on_a_host = []
    for axis, size in enumerate(sizes):
        stride = prod(sizes[axis + 1 :])
        on: dict[int, set[tuple[int, int]]] = {}
        for rank in range(prod(sizes)):
            on.setdefault(rank // host_ranks, set()).add((rank // (stride * size), rank % stride))
        most_on_a_host.append(max(map(len, on.values())))
    return tuple(most_on_a_host)
