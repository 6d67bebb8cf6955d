"""Gradient sums and parameter gathers along the axes of a grid of ranks (``communication.topology``).

Only zero_runtime supports this. Rank numbers increase along the last axis first. Each collective is composed of smaller
collectives, in this order:

* all_reduce: First, reduce_scatters along all axes but the first, from the last axis to the second. Each takes the
  result of the previous one. Then an all_reduce along the first axis. Then all_gathers along the same axes in reverse
  order. The message is padded to a multiple of the number of ranks of all axes but the first.
* reduce_scatter: A reduce_scatter along every axis, from the last axis to the first.
* all_gather: An all_gather along every axis, from the first axis to the last.

A reduce_scatter is an all_to_all if the runtime issues it as an all_to_all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isqrt, prod
from typing import Any, Final, NamedTuple

from commprof.requested.communication.measured_costs import Costs
from commprof.requested.config_keys import section
from commprof.requested.errors import RequestedError, UnsupportedError
from commprof.requested.expectation import Expectation
from commprof.requested.zero.partition import padded
from commprof.schema import Op, Purpose, wire_bytes

Sizes = tuple[int, ...]
_TRAVELS: Final = (Purpose.GRADIENT_REDUCE, Purpose.PARAMETER_GATHER)
_SCATTERS: Final = (Op.REDUCE_SCATTER, Op.ALL_TO_ALL)
_KEY: Final = "communication.topology"
AUTO: Final = "auto"
_MOST_AXES: Final = 3
_LARGEST_ITEM: Final = 8  # bytes of the largest element; padding is less than one element per rank
_UNKNOWN_SIZES: Final = "which messages go along the axes, by their sizes and measured costs"


class _Leg(NamedTuple):
    """One message of a composed collective.

    Attributes:
        axis: The axis along which the message is sent. 0 is the outermost axis.
        op: The operation. A reduce_scatter may be issued as an all_to_all.
        part: The divisor of the size: the message has 1 / ``part`` of the bytes of the composed collective.
    """

    axis: int
    op: Op
    part: int


def sizes_of(
    config: Mapping[str, Any], world_size: int, host_ranks: int | None, seen: Sizes | None = None
) -> Sizes:
    """Return the number of ranks along each axis, outermost first. One axis means that collectives are plain.

    Args:
        config: The full config.
        world_size: The number of all ranks.
        host_ranks: The number of ranks per host, or None if it is not known.
        seen: The sizes of the axes that the groups of a run show, or None without a run.

    Raises:
        RequestedError: the product of the sizes is not the number of ranks, or the key has an invalid value.
        UnsupportedError: the sizes depend on the number of ranks per host, which is not known.
    """
    topology = section(config, "communication").get("topology")
    if topology is None or topology == 1 or world_size == 1:
        return (world_size,)
    if isinstance(topology, list) and all(isinstance(size, int) for size in topology):
        if prod(topology) != world_size:
            raise RequestedError(
                f"{_KEY} is {topology}, a grid of {prod(topology)} ranks, but there are {world_size} ranks"
            )
        return tuple(size for size in topology if size > 1) or (1,)
    if topology != AUTO and topology not in range(1, _MOST_AXES + 1):
        raise RequestedError(f"{_KEY} is {topology!r}; expected 1, 2, 3, auto or a list of sizes")
    if seen is not None:
        return seen
    if host_ranks is None or world_size % host_ranks:
        reason = "the axes then depend on how many ranks each host has"
        raise UnsupportedError(_KEY, topology, reason)
    if topology == AUTO:
        split = 1 < host_ranks < world_size
        return (world_size // host_ranks, host_ranks) if split else (world_size,)
    return _cut_to_hosts(world_size, topology, host_ranks)


def _cut_to_hosts(world_size: int, axes: int, host_ranks: int) -> Sizes:
    """Return the sizes of at most ``axes`` axes, with as many axes as possible.

    With several hosts, one axis boundary separates the hosts. All other sizes are as equal as possible.
    """
    for wanted in range(axes, 1, -1):
        if not 1 < host_ranks < world_size:
            axis_sizes = _most_even(world_size, wanted)
        else:
            outer, inner = (
                _most_even(world_size // host_ranks, wanted - 1),
                _most_even(host_ranks, wanted - 1),
            )
            axis_sizes = (
                (*outer, host_ranks) if outer else (world_size // host_ranks, *inner) if inner else ()
            )
        if axis_sizes:
            return axis_sizes
    return (world_size,)


def _most_even(number: int, factors: int) -> Sizes:
    """Return ``number`` as a product of ``factors`` factors above 1, in increasing order.

    The largest factor is as small as possible. The result is empty if there are no such factors.
    """
    if factors == 1:
        return (number,) if number > 1 else ()
    candidates: list[Sizes] = []
    for factor in range(2, isqrt(number) + 1):
        rest = _most_even(number // factor, factors - 1) if number % factor == 0 else ()
        if rest:
            candidates.append(tuple(sorted((factor, *rest))))
    return min(candidates, key=max, default=())


def composed(
    rows: Iterable[Expectation],
    sizes: Sizes,
    items: Mapping[Purpose, int],
    *,
    exchanges: bool,
    costs: Costs | None = None,
) -> list[Expectation]:
    """Return ``rows`` with the messages that are sent along the axes composed of smaller messages.

    Args:
        rows: The messages as they would be sent among all ranks.
        sizes: The sizes of the axes, outermost first, all above 1. A single axis leaves the rows unchanged.
        items: The bytes of an element that an all_reduce sums, by purpose.
        exchanges: Whether a reduce_scatter is issued as an all_to_all.
        costs: The costs that decide for each message whether it is sent along the axes. None sends all messages along
            the axes.
    """
    listed = list(rows)
    if len(sizes) < 2:
        return listed
    messages = []
    for each in listed:
        if not _travels(each):
            messages.append(each)
            continue
        along, plain = (each, None) if costs is None else _chosen(each, sizes, costs, exchanges)
        messages += [] if along is None else _composed(along, sizes, items, exchanges=exchanges)
        messages += [] if plain is None else [plain]
    return messages


def _travels(row: Expectation) -> bool:
    """Return whether messages of this kind are sent along the axes."""
    if row.purpose not in _TRAVELS or row.group_size is not None or row.groups is not None:
        return False
    if row.issued_op == Op.REDUCE_SCATTER and any(len(set(each)) > 1 for each in row.payloads):
        return False  # the rows differ in length, which only a list of tensors allows
    if row.issued_op in _SCATTERS:
        # An all_to_all without row sizes is not a replacement of a reduce_scatter.
        return bool(row.payload_bytes) and bool(_rows_of(row))
    return bool(row.payload_bytes) and row.issued_op in (Op.ALL_REDUCE, Op.ALL_GATHER)


def _rows_of(row: Expectation) -> list[tuple[int, ...]]:
    return [each for each in row.payloads if row.issued_op == Op.REDUCE_SCATTER or len(each) > 1]


def _chosen(
    row: Expectation, sizes: Sizes, costs: Costs, exchanges: bool
) -> tuple[Expectation | None, Expectation | None]:
    """Return the messages of ``row`` that are sent along the axes, and those that are sent among all ranks at once.

    If the sizes of single messages are not certain, this division is an estimate.
    """
    op = Op.REDUCE_SCATTER if row.issued_op in _SCATTERS else Op(row.issued_op)
    ways: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    for each in row.payloads:
        ways[costs.goes_along(op, sum(each), sizes, exchanges=exchanges)].append(each)
    certain = row.exact and row.bytes_exact
    if certain and not (ways[True] and ways[False]):
        return (row, None) if ways[True] else (None, row)
    along, plain = (_part(row, ways[way], prod(sizes), certain) for way in (True, False))
    return along, plain


def _part(row: Expectation, payloads: Sequence[tuple[int, ...]], ranks: int, certain: bool) -> Expectation:
    total = sum(map(sum, payloads))
    most = row.payload_bytes + row.count * ranks * _LARGEST_ITEM if row.bytes_exact else row.most_bytes
    return row._replace(
        count=len(payloads),
        payload_bytes=total,
        wire_bytes=wire_bytes(row.issued_op, total, ranks),
        exact=certain,
        bytes_exact=certain,
        least_bytes=total if certain else 0,
        most_bytes=None if certain else most,
        estimate=row.estimate if certain else (row.estimate or _UNKNOWN_SIZES),
        padding_bytes=None,
        payloads=tuple(payloads),
    )


def _composed(
    row: Expectation, sizes: Sizes, items: Mapping[Purpose, int], *, exchanges: bool
) -> list[Expectation]:
    shown = " x ".join(map(str, sizes))
    row = row._replace(note="; ".join(filter(None, (row.note, f"along the axes of a grid of {shown} ranks"))))
    if row.issued_op in _SCATTERS:
        return _scattered(row, [_row_bytes(each, prod(sizes)) for each in _rows_of(row)], sizes)
    legs = _legs_of_all_reduce(sizes) if row.issued_op == Op.ALL_REDUCE else _legs_of_all_gather(sizes)
    unit = prod(sizes[1:]) * items[Purpose(row.purpose)] if row.issued_op == Op.ALL_REDUCE else 1
    payloads = [padded(sum(each), unit) for each in row.payloads]
    # The amount of padding depends on the division of gradients into messages, which may be unknown.
    sure = row.bytes_exact and (row.exact or sum(payloads) == row.payload_bytes)
    most = row.most_bytes
    if row.bytes_exact and not sure:
        most = sum(payloads) + unit * row.count
    return [_leg_row(row, leg, payloads, sizes, sure, most, exchanges) for leg in legs]


def _legs_of_all_reduce(sizes: Sizes) -> list[_Leg]:
    inward = [_Leg(axis, Op.REDUCE_SCATTER, prod(sizes[axis + 1 :])) for axis in range(len(sizes) - 1, 0, -1)]
    outward = [leg._replace(op=Op.ALL_GATHER) for leg in reversed(inward)]
    return [*inward, _Leg(0, Op.ALL_REDUCE, prod(sizes[1:])), *outward]


def _legs_of_all_gather(sizes: Sizes) -> list[_Leg]:
    return [_Leg(axis, Op.ALL_GATHER, prod(sizes[axis + 1 :])) for axis in range(len(sizes))]


def _leg_row(
    row: Expectation,
    leg: _Leg,
    payloads: Sequence[int],
    sizes: Sizes,
    sure: bool,
    most: int | None,
    exchanges: bool,
) -> Expectation:
    issued = Op.ALL_TO_ALL if leg.op == Op.REDUCE_SCATTER and exchanges else leg.op
    scatters = row.issued_op == Op.ALL_REDUCE and leg.op == Op.REDUCE_SCATTER
    total = sum(each // leg.part for each in payloads)
    return row._replace(
        issued_op=str(issued),
        intended_op=str(Op.REDUCE_SCATTER) if scatters and exchanges else row.intended_op,
        payload_bytes=total,
        wire_bytes=wire_bytes(issued, total, sizes[leg.axis]),
        bytes_exact=sure,
        least_bytes=total if sure else row.least_bytes // leg.part,
        most_bytes=None if most is None else -(-most // leg.part),
        groups=lines(sizes, leg.axis),
        padding_bytes=None,
        payloads=tuple((each // leg.part,) for each in payloads),
    )


def _scattered(row: Expectation, messages: Sequence[Sequence[int]], sizes: Sizes) -> list[Expectation]:
    """Return the messages of a reduce_scatter along every axis. ``messages`` contains the bytes of each row.

    The sizes of later messages depend on the position of a rank, because rows may differ in length.
    """
    scattered = []
    for axis in range(len(sizes) - 1, -1, -1):
        stride = prod(sizes[axis + 1 :])
        by_bytes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for line in lines(sizes, axis):
            bytes_of_rows = tuple(sum(each[line[0] % stride :: stride]) for each in messages)
            by_bytes.setdefault(bytes_of_rows, []).append(line)
        for bytes_of_rows, groups in by_bytes.items():
            total = sum(bytes_of_rows)
            share = total / (row.payload_bytes or 1)
            scattered.append(
                row._replace(
                    payload_bytes=total,
                    wire_bytes=wire_bytes(row.issued_op, total, sizes[axis]),
                    least_bytes=total if row.bytes_exact else int(row.least_bytes * share),
                    groups=tuple(groups),
                    padding_bytes=None,
                    payloads=tuple((each,) for each in bytes_of_rows),
                )
            )
    return scattered


def _row_bytes(payload: tuple[int, ...], ranks: int) -> Sequence[int]:
    """Return the bytes of each rank's row of a message. If only the sum is known, the rows are equal."""
    return payload if len(payload) > 1 else [payload[0] // ranks] * ranks


def lines(sizes: Sizes, axis: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each group along ``axis``. The ranks of a group differ only in this coordinate.

    >>> lines((2, 3), 0)
    ((0, 3), (1, 4), (2, 5))
    """
    stride = prod(sizes[axis + 1 :])
    firsts = [rank for rank in range(prod(sizes)) if rank // stride % sizes[axis] == 0]
    return tuple(tuple(first + stride * place for place in range(sizes[axis])) for first in firsts)
