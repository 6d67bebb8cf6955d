"""Which messages go along the axes of a grid, by measured costs (``communication.calibration``).

An operation on S bytes (of nccl-tests) among n ranks takes alpha + S f(n) / B, with f the bus factor of nccl-tests: 2(n-1)/n
of an all_reduce, (n-1)/n of the others. A message goes along the axes where the sum over its operations is below the time
of the plain collective. Groups of one axis that share a host's links count with that many times their bytes.
Alpha and B are from the files of ``commprof calibrate``, or what the runtime published of them.
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
    """Latency of an operation, and its time per byte at a bus factor of 1."""

    alpha_ns: float
    bus_ns_per_byte: float


Table = Mapping[Op, Cost]


class Costs(NamedTuple):
    """The costs of all operations on a grid.

    Attributes:
        world: among all ranks.
        axes: among those of a group of each axis, outermost first.
        sharing: groups of each axis that share one host's links.
    """

    world: Table
    axes: Sequence[Table]
    sharing: Sequence[int]

    def goes_along(self, op: Op, payload_bytes: int, sizes: Sequence[int], *, exchanges: bool) -> bool:
        """Whether a message goes along axes of ``sizes``.

        Args:
            op: all_reduce, reduce_scatter or all_gather, the intended operation.
            payload_bytes: of the whole message.
            sizes: ranks along each axis, outermost first.
            exchanges: whether a reduce_scatter is issued as an all_to_all.
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
    """The bytes from which ``op`` reaches :data:`BANDWIDTH_SHARE` of its bandwidth: p / (1 - p) alpha beta."""
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
    """The costs that decide which way messages go; None where every message goes along the axes, or none does.

    Args:
        config: the whole config.
        sizes: ranks along each axis.
        host_ranks: ranks of each host, which follow one another; None where that is not known.
        published: the costs that a run has read and published; None reads the files.

    Raises:
        UnsupportedError: they cannot be known.
    """
    files = section(config, "communication").get("calibration")
    if len(sizes) < 2 or not files:
        return None
    if published is not None:
        return _published_costs(published, len(sizes), files)
    paths = [files.get("world"), *(files.get("axes") or ())] if isinstance(files, Mapping) else []
    if len(paths) != len(sizes) + 1:
        reason = f"a file among all ranks and one for each of the {len(sizes)} axes are needed"
        raise UnsupportedError(KEY, files, reason)
    if host_ranks is None:
        raise UnsupportedError(KEY, files, "how many ranks share the links of a host is not known")
    world, *axes = (read_costs(str(path)) for path in paths)
    return Costs(world, axes, _sharing(sizes, host_ranks))


def _published_costs(published: object, axes: int, files: object) -> Costs:
    """The costs that a run has published: ``world``, ``axes`` and ``sharing``, an operation being two numbers."""
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
        reason = f"the run read costs of {len(tables) - 1} axes, and has {axes}"
        raise UnsupportedError(KEY, files, reason)
    return Costs(tables[0], tables[1:], sharing)


def read_costs(path: str, wanted: Sequence[Op] = OPS) -> Table:
    """The costs of the ``wanted`` operations in a file of ``commprof calibrate``.

    Raises:
        UnsupportedError: it cannot be read here, or has no fitted times of one of them.
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
    """Groups of each axis that have ranks on one host, as many as on the host with the most."""
    most_on_a_host = []
    for axis, size in enumerate(sizes):
        stride = prod(sizes[axis + 1 :])
        on: dict[int, set[tuple[int, int]]] = {}
        for rank in range(prod(sizes)):
            on.setdefault(rank // host_ranks, set()).add((rank // (stride * size), rank % stride))
        most_on_a_host.append(max(map(len, on.values())))
    return tuple(most_on_a_host)
