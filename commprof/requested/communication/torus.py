"""Gradient sums and parameter gathers that go along the axes of a grid of ranks (``communication.topology``).

Only zero_runtime does it. Ranks are numbered along the last axis first. A message of S bytes becomes, in this order:

* all_reduce: a reduce_scatter along every axis but the first, the last one first, each of the previous result; an
  all_reduce along the first; all_gathers along the axes in reverse. It is padded to a multiple of the ranks of all axes
  but the first;
* reduce_scatter: a reduce_scatter along every axis, the last one first;
* all_gather: an all_gather along every axis, the first one first.

A reduce_scatter is an all_to_all where the runtime issues it as one.
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
_LARGEST_ITEM: Final = 8  # bytes of an element; a message is padded by less than one for each rank
_UNKNOWN_SIZES: Final = "which messages go along the axes, by their sizes and measured costs"


class _Leg(NamedTuple):
    """One message of a composed collective.

    Attributes:
        axis: along which it goes; 0 is the outermost.
        op: as :class:`Op` names it; a reduce_scatter may be issued as an all_to_all.
        part: 1 / this share of the whole message.
    """

    axis: int
    op: Op
    part: int


def sizes_of(
    config: Mapping[str, Any], world_size: int, host_ranks: int | None, seen: Sizes | None = None
) -> Sizes:
    """The ranks along each axis, outermost first; a single number where collectives are plain.

    Args:
        config: the whole config.
        world_size: all ranks.
        host_ranks: ranks of each host; None where that is not known.
        seen: the axes of the groups of a run, which show its hosts; None without a run.

    Raises:
        RequestedError: the sizes do not multiply to the ranks, or the key has another value than it may have.
        UnsupportedError: it depends on hosts that are not known.
    """
    topology = section(config, "communication").get("topology")
    if topology is None or topology == 1 or world_size == 1:
        return (world_size,)
    if isinstance(topology, list) and all(isinstance(size, int) for size in topology):
        if prod(topology) != world_size:
            raise RequestedError(
                f"{_KEY} is {topology}, a grid of {prod(topology)} ranks, and there are {world_size}"
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
    """Up to ``axes`` axes, as many as possible: the last one is a host where there are several, else as even as possible."""
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
    """``number`` as ``factors`` rising factors above 1, the largest as small as possible; empty where there are none."""
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
    """``rows`` as they go along the axes.

    Args:
        rows: as they would be among all ranks.
        sizes: of the axes, outermost first, all above 1; a single one leaves all as it is.
        items: bytes of an element of what an all_reduce sums, by purpose.
        exchanges: whether a reduce_scatter is issued as an all_to_all.
        costs: by which each message goes along the axes or not; None has every one do so.
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
    """Whether these are messages of a kind that goes along axes."""
    if row.purpose not in _TRAVELS or row.group_size is not None or row.groups is not None:
        return False
    if row.issued_op == Op.REDUCE_SCATTER and any(len(set(each)) > 1 for each in row.payloads):
        return False  # a list of rows that differ in length
    if row.issued_op in _SCATTERS:
        # An all_to_all without row sizes is not a replacement of a reduce_scatter.
        return bool(row.payload_bytes) and bool(_rows_of(row))
    return bool(row.payload_bytes) and row.issued_op in (Op.ALL_REDUCE, Op.ALL_GATHER)


def _rows_of(row: Expectation) -> list[tuple[int, ...]]:
    return [each for each in row.payloads if row.issued_op == Op.REDUCE_SCATTER or len(each) > 1]


def _chosen(
    row: Expectation, sizes: Sizes, costs: Costs, exchanges: bool
) -> tuple[Expectation | None, Expectation | None]:
    """The messages of ``row`` that go along the axes, and those that go among all ranks at once.

    Where the sizes of single messages are not certain, how many go which way is an estimate.
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
    # How much padding there is depends on how gradients are split, where that is not known.
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
    """A reduce_scatter of rows, whose bytes ``messages`` list; the position of a rank decides what remains."""
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
    """The bytes of each rank's row of a message: equal ones where only its sum is known."""
    return payload if len(payload) > 1 else [payload[0] // ranks] * ranks


def lines(sizes: Sizes, axis: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each group along ``axis``: those that differ in that coordinate alone.

    >>> lines((2, 3), 0)
    ((0, 3), (1, 4), (2, 5))
    """
    stride = prod(sizes[axis + 1 :])
    firsts = [rank for rank in range(prod(sizes)) if rank // stride % sizes[axis] == 0]
    return tuple(tuple(first + stride * place for place in range(sizes[axis])) for first in firsts)
