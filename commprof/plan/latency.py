"""Determine whether the largest gradient message is latency bound, and write a sentence about the result.

A message is latency bound if its latency takes longer than its transfer. With a calibration, the size of the chunk
of one owner decides. Without a calibration, NCCL's model decides.

A ring moves one chunk in each of its steps: the message divided by the number of ranks. A calibration gives the
time of a message of S bytes as alpha + S / beta on n ranks. Both terms are equal if a chunk has alpha * beta / n
bytes. The same size of chunk is assumed to apply at other numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from commprof.analysis.api import format_bytes, format_ns
from commprof.calibration.results import Calibration
from commprof.plan.hosts import Hosts, Links, Place, groups_of, places_of
from commprof.plan.nccl_model import fastest
from commprof.plan.traffic import Traffic, traffic_of
from commprof.requested.expectation import Expectation
from commprof.schema import Purpose

_MOST_POWER: Final = 21  # numbers of ranks up to 2**20 are tried
_SIZES: Final = tuple(2**power - 1 for power in range(1, 45))


class Chunk(NamedTuple):
    """The chunk of the largest gradient message.

    Attributes:
        op: The operation of the message.
        message_bytes: The payload of the message, in bytes.
        group_size: The number of ranks of the group that sends the message.
        least_bytes: The size of a chunk whose latency and transfer take equally long, in bytes.
    """

    op: str
    message_bytes: int
    group_size: int
    least_bytes: float

    @property
    def num_bytes(self) -> float:
        """The size of the chunk of one owner, in bytes."""
        return self.message_bytes / self.group_size

    @property
    def most_ranks(self) -> int:
        """The maximum number of ranks at which the message is bandwidth bound."""
        return int(self.message_bytes / self.least_bytes)


def gradient_chunk(traffic: Iterable[Traffic], calibration: Calibration) -> Chunk | None:
    """Return the chunk of the largest gradient message.

    The result is None without a gradient message, or if the calibration has no latency of its operation.
    """
    reduced = [
        row for row in traffic if row.purpose == Purpose.GRADIENT_REDUCE and row.sizes and row.group_size > 1
    ]
    if not reduced:
        return None
    largest = max(reduced, key=lambda row: max(row.sizes))
    fitted = calibration.fits().get(largest.op)
    if fitted is None or not fitted.alpha_ns > 0:
        return None
    least = fitted.alpha_ns / fitted.slope / calibration.world_size
    return Chunk(largest.op, max(largest.sizes), largest.group_size, least)


class Bound(NamedTuple):
    """The times of the largest gradient message by NCCL's model, which show whether it is latency bound.

    Attributes:
        op: The operation of the message.
        message_bytes: The payload of the message, in bytes.
        ranks: The number of ranks of the group that sends the message.
        time_ns: The time of the message, in ns.
        latency_ns: The part of ``time_ns`` that an empty message would take.
        least_bytes: The power of two from which on the transfer of all messages takes at least as long as their
            latency.
        most_ranks: The maximum number of ranks, a power of two, up to which the message is bandwidth bound. It is
            0 if the message is latency bound at every number of ranks.
    """

    op: str
    message_bytes: int
    ranks: int
    time_ns: float
    latency_ns: float
    least_bytes: int
    most_ranks: int

    @property
    def by_latency(self) -> bool:
        """Whether latency takes longer than the transfer."""
        return 2 * self.latency_ns > self.time_ns


def gradient_bound(sent: Iterable[Expectation], hosts: Hosts, links: Links) -> Bound | None:
    """Return whether latency or bandwidth limits the largest gradient message among ``sent``.

    None means that there is no gradient message, or that the rates of its links are not known.
    """
    reduced = [each for each in sent if each.purpose == Purpose.GRADIENT_REDUCE and each.payloads]
    sizes = [(max(map(sum, each.payloads)), each) for each in reduced]
    size, row = max(sizes, key=lambda pair: pair[0], default=(0, None))
    if row is None or not size:
        return None
    place = places_of(groups_of(row, hosts), hosts)[0]
    if place.ranks < 2:
        return None

    def is_latency_bound(num_bytes: int, at: Place) -> bool:
        cost = fastest(row.issued_op, num_bytes, at, links)
        return cost is None or cost.latency_ns > cost.ns_per_byte * num_bytes

    cost = fastest(row.issued_op, size, place, links)
    if cost is None:
        return None
    ranks = [2**power for power in range(1, _MOST_POWER)]
    # Other numbers of ranks are placed on hosts like the present group: with as many ranks on each host, or with as
    # many as fit beside the groups that share the host.
    local = place.local if place.hosts > 1 else max(place.ranks, hosts.ranks // place.sharing)
    shapes = [Place(each, -(-each // local), min(each, local), place.sharing) for each in ranks]
    timed = [each for each in shapes if fastest(row.issued_op, size, each, links) is not None]
    bandwidth_bound = list(takewhile(lambda shape: not is_latency_bound(size, shape), timed))
    return Bound(
        row.issued_op,
        size,
        place.ranks,
        cost.time_ns(size),
        cost.latency_ns,
        1 + max((each for each in _SIZES if is_latency_bound(each, place)), default=0),
        bandwidth_bound[-1].ranks if bandwidth_bound else 0,
    )


def by_calibration(sent: Sequence[Expectation], hosts: Hosts, calibration: Calibration) -> str | None:
    """Return a sentence that says whether the largest gradient message is latency bound by ``calibration``.

    The result is None if ``sent`` has no such message, or if the calibration has no latency of its operation.
    """
    chunk = gradient_chunk(traffic_of(sent, hosts), calibration)
    if chunk is None:
        return None
    bound = "latency" if chunk.num_bytes < chunk.least_bytes else "bandwidth"
    ranks = chunk.most_ranks
    limit = (
        f"Up to {ranks:,} ranks it is bandwidth bound"
        if ranks > 1
        else "It stays latency bound at any number of ranks"
    )
    return (
        f"The largest gradient message, {chunk.op} of {format_bytes(chunk.message_bytes)}, is "
        f"{format_bytes(chunk.num_bytes)} per owner at {chunk.group_size:,} ranks: {bound} bound. "
        f"{limit}: latency equals the transfer of "
        f"{format_bytes(chunk.least_bytes)} per owner in the calibration "
        f"({calibration.world_size} ranks, {calibration.backend} on {calibration.device})."
    )


def by_model(sent: Iterable[Expectation], hosts: Hosts, links: Links) -> str | None:
    """Return a sentence that says whether the largest gradient message is latency bound by NCCL's model, or None."""
    bound = gradient_bound(sent, hosts, links)
    if bound is None:
        return None
    message = (
        f"By NCCL's model the largest gradient message, {bound.op} of {format_bytes(bound.message_bytes)}, takes "
        f"{format_ns(bound.time_ns)} at {bound.ranks:,} ranks, {format_ns(bound.latency_ns)} of it latency"
    )
    if bound.by_latency:
        ranks = f"up to {bound.most_ranks:,} ranks, or " if bound.most_ranks else ""
        return f"{message}: latency bound. It is bandwidth bound {ranks}from {format_bytes(bound.least_bytes)} on."
    # The maximum number of ranks is named only if it includes the present number. It may be less, because the rate
    # of one kind of link is missing or because a smaller group is latency bound.
    ranks = f" up to {bound.most_ranks:,} ranks, and" if bound.most_ranks >= bound.ranks else ""
    return f"{message}: bandwidth bound{ranks} from {format_bytes(bound.least_bytes)} on."
