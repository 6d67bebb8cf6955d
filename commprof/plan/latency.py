"""Whether messages are so small at a number of ranks that latency takes longer than the transfer, and a sentence about it.

With a calibration that is a question of the chunk of one owner, without one of NCCL's model.

A ring moves one chunk, a message divided by its ranks, in each of its steps. A calibration gives the time of a message of S
bytes as alpha + S / beta on n ranks. Both terms are equal where a chunk has alpha * beta / n bytes, and this is assumed
to hold at other numbers of ranks.
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

_MOST_POWER: Final = 21  # of two: numbers of ranks that are tried
_SIZES: Final = tuple(2**power - 1 for power in range(1, 45))


class Chunk(NamedTuple):
    """The chunk of the largest gradient message.

    Attributes:
        op: of the message.
        message_bytes: its payload.
        group_size: ranks that share it.
        least_bytes: the chunk whose latency and transfer take equally long.
    """

    op: str
    message_bytes: int
    group_size: int
    least_bytes: float

    @property
    def num_bytes(self) -> float:
        """Bytes of the chunk of one owner."""
        return self.message_bytes / self.group_size

    @property
    def most_ranks(self) -> int:
        """Ranks up to which the message is bandwidth bound."""
        return int(self.message_bytes / self.least_bytes)


def gradient_chunk(traffic: Iterable[Traffic], calibration: Calibration) -> Chunk | None:
    """Return the chunk of the largest gradient message; None without one, or without a latency of its operation."""
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
    """What the largest gradient message is bound by, by NCCL's model.

    Attributes:
        op: of the message.
        message_bytes: its payload.
        ranks: that share it.
        time_ns: of it.
        latency_ns: the part of it that an empty message would take.
        least_bytes: a power of two from which on the transfer of all messages takes at least as long as their latency.
        most_ranks: the most ranks, a power of two, up to which the message is bandwidth bound; 0: at no number.
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
    """Return what the largest gradient message among ``sent`` is bound by; None without one, or without its rates."""
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
    # Other numbers of ranks are on hosts as these are: as many of each host, or as fit beside the groups that share it.
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
    """Return whether the largest gradient message among ``sent`` is latency bound by ``calibration``; None where that is
    not known.
    """
    chunk = gradient_chunk(traffic_of(sent, hosts), calibration)
    if chunk is None:
        return None
    bound = "latency" if chunk.num_bytes < chunk.least_bytes else "bandwidth"
    ranks = chunk.most_ranks
    limit = f"Up to {ranks:,} ranks it is bandwidth bound" if ranks > 1 else "It is so at any number of ranks"
    return (
        f"The largest gradient message, {chunk.op} of {format_bytes(chunk.message_bytes)}, is "
        f"{format_bytes(chunk.num_bytes)} per owner at {chunk.group_size:,} ranks: {bound} bound. "
        f"{limit}: latency equals the transfer of "
        f"{format_bytes(chunk.least_bytes)} per owner in the calibration "
        f"({calibration.world_size} ranks, {calibration.backend} on {calibration.device})."
    )


def by_model(sent: Iterable[Expectation], hosts: Hosts, links: Links) -> str | None:
    """The same by NCCL's model."""
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
    # The rates of one kind of link may be missing, or a smaller group be latency bound.
    ranks = f" up to {bound.most_ranks:,} ranks, and" if bound.most_ranks >= bound.ranks else ""
    return f"{message}: bandwidth bound{ranks} from {format_bytes(bound.least_bytes)} on."
