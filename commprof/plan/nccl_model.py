"""Compute the time of a collective by NCCL's model of its algorithms and protocols, as torch's inductor does.

The formulas and constants are those of ``torch/_inductor/comm_analysis.py`` in torch 2.13.0, which took them from
NCCL's ``src/graph/tuning.cc``. The time of a message of S bytes is a latency plus S divided by a bandwidth. The
fastest combination of an algorithm (ring or tree) and a protocol (LL, LL128 or Simple) counts. There are three
differences from inductor:

* The bandwidths are those of ``--links``, not those of a table of GPUs. Inductor's corrections for one InfiniBand
  network are left out. So are the limits of a channel, which such rates do not reach on Hopper GPUs.
* Inductor has no times for broadcast, reduce, gather and scatter. Here they take the steps of an all_gather.
* all_to_all, gather and scatter send bytes to every rank directly. These bytes are divided by the rate of the
  links that they use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from commprof.calibration.bandwidths import bus_factor
from commprof.plan.hosts import DIRECT, Links, Place
from commprof.schema import Op

SOURCE: Final = "NCCL's model of latencies, as in torch 2.13's inductor, at the rates of --links"

_LL, _LL128, _SIMPLE = 0, 1, 2
# Microseconds, in the order of the protocols above.
_BASE_LATENCY: Final = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_INSIDE_LATENCY: Final = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}  # of a step, over NVLink
_BETWEEN_LATENCY: Final = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}  # of a step, over a network
_NETWORK_OVERHEAD: Final = (
    1.0,
    1.0,
    3.0,
)  # minimum latency of a step inside a host, if the group spans several hosts
# The maximum rate of LL in bytes per second: inside a Hopper host, on 2 hosts, and on more hosts.
_LL_LIMITS: Final = (141e9, 39e9, 20.4e9)
# The fraction of its bandwidth that a tree reaches, by protocol, for messages of 64 B, 128 B, ... 512 MiB. The
# fraction is 1 for larger messages.
_TREE_CORRECTION: Final = tuple(
    tuple(int(digit) / 10 for digit in digits.split())
    for digits in (
        "10 10 10 10 9 8 7 7 7 7 6 5 4 4 5 6 7 8 9 10 10 10 10 10",
        "10 10 10 10 10 9 8 8 8 7 6 6 6 6 6 6 8 9 9 9 9 10 10 10",
        "9 9 9 9 9 9 9 8 7 6 6 5 5 5 5 6 7 8 7 7 8 9 9 9",
    )
)


class Cost(NamedTuple):
    """The time of a message by one algorithm and protocol.

    Attributes:
        latency_ns: The time of an empty message, in ns.
        ns_per_byte: The additional time for each byte of payload, in ns.
    """

    latency_ns: float
    ns_per_byte: float

    def time_ns(self, payload_bytes: float) -> float:
        """Return the time of a message with ``payload_bytes`` bytes of payload, in ns."""
        return self.latency_ns + self.ns_per_byte * payload_bytes


def fastest(op: str, payload_bytes: float, place: Place, links: Links) -> Cost | None:
    """Return the cost of a message by its fastest algorithm and protocol.

    The result is None if ``links`` lacks the rate of a link that the group needs.

    Args:
        op: A value of schema.Op.
        payload_bytes: The payload, S of nccl-tests.
        place: The place of the ranks of the group.
        links: The rates inside a host and between hosts.
    """
    rate = _bus_bandwidth(place, links)
    if rate is None:
        return None
    costs = _costs(op, payload_bytes, place, links, rate)
    return min(costs, key=lambda cost: cost.time_ns(payload_bytes))


def _bus_bandwidth(place: Place, links: Links) -> float | None:
    """Return the rate of a ring through all ranks of the group, in bytes per second: the rate of its slowest link."""
    inside, between = links.intra, None if links.inter is None else links.inter / place.sharing
    if place.hosts == 1:
        return inside
    if place.local == 1 or between is None or inside is None:
        return between
    return min(inside, between)


def _costs(op: str, payload_bytes: float, place: Place, links: Links, rate: float) -> Iterator[Cost]:
    for protocol in (_LL, _LL128, _SIMPLE):
        if protocol == _LL128 and place.hosts > 1:
            continue  # torch does not use LL128 between hosts: its bandwidths are those of NVLink
        yield _ring(op, protocol, place, links, rate)
        if op in (Op.ALL_REDUCE, Op.BARRIER):
            yield _tree(payload_bytes, protocol, place, rate)


def _ring(op: str, protocol: int, place: Place, links: Links, rate: float) -> Cost:
    ranks, hosts = place.ranks, place.hosts
    rounds = 2 if op in (Op.ALL_REDUCE, Op.BARRIER, Op.ALL_TO_ALL) else 1
    steps = 1 if op in (Op.SEND, Op.RECV) else rounds * (ranks - 1)
    # The steps between hosts. For an all_to_all, torch counts only one round of them.
    crossing = min(steps, (hosts - 1) * (1 if op == Op.ALL_TO_ALL else rounds))
    latency = _BASE_LATENCY["ring"][protocol] + _steps_latency("ring", protocol, steps, crossing, hosts)
    reached = {_LL: min(0.5, _ll_limit(hosts) / rate), _LL128: 120 / 128, _SIMPLE: 1.0}[protocol]
    if op in DIRECT:
        seconds = _seconds_of_direct(op, place, links)
    else:
        # The number of times that a byte of the payload crosses each link of the ring.
        passes = bus_factor(Op.ALL_REDUCE if op == Op.BARRIER else op, ranks)
        seconds = (passes or 0.0) / rate
    return Cost(1e3 * latency, 1e9 * seconds / reached)


def _tree(payload_bytes: float, protocol: int, place: Place, rate: float) -> Cost:
    hosts = place.hosts
    crossing = 2 * (hosts.bit_length() - 1)
    inside = 2 * (place.ranks // hosts - 1)
    latency = _BASE_LATENCY["tree"][protocol]
    latency += _steps_latency("tree", protocol, inside + crossing, crossing, hosts)
    reached = {
        _LL: min(1 / 3.8, _ll_limit(hosts) / rate),
        _LL128: 7 / 9 if hosts == 1 else 120 / 128,
        _SIMPLE: 0.92,
    }[protocol]
    size = int(payload_bytes) >> 6
    corrections = _TREE_CORRECTION[protocol]
    exponent = max(0, size.bit_length() - 1)
    if exponent < len(corrections):
        reached *= corrections[exponent]
    return Cost(1e3 * latency, 1e9 * 2 / (rate * reached))


def _steps_latency(algorithm: str, protocol: int, steps: int, crossing: int, hosts: int) -> float:
    inside = _INSIDE_LATENCY[algorithm][protocol]
    if hosts > 1:
        inside = max(inside, _NETWORK_OVERHEAD[protocol])
    return (steps - crossing) * inside + crossing * _BETWEEN_LATENCY[algorithm][protocol]


def _ll_limit(hosts: int) -> float:
    return _LL_LIMITS[min(hosts, 3) - 1]


def _seconds_of_direct(op: str, place: Place, links: Links) -> float:
    """Return the seconds per byte of payload, on the slower links: those inside a host or those between hosts."""
    others = place.ranks - 1
    # The root of a gather receives this whole fraction, and the root of a scatter sends it.
    sent = others / place.ranks
    inside = sent * (place.local - 1) / others
    between = sent * (place.ranks - place.local) / others * place.sharing
    if op == Op.ALL_TO_ALL:
        between *= place.local
    seconds = [0.0]
    if links.intra is not None:
        seconds.append(inside / links.intra)
    if links.inter is not None:
        seconds.append(between / links.inter)
    return max(seconds)
