"""The messages of a step per purpose and operation: sizes, and bytes per rank, inside a host and between hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from commprof.plan.hosts import DIRECT, Hosts, groups_of, sent_by_link
from commprof.plan.rank_classes import RankClass, mean_wire_bytes, rank_classes
from commprof.requested.expectation import Expectation
from commprof.schema import Op


class Traffic(NamedTuple):
    """The messages of one purpose, operation and kind of group, in one step.

    Attributes:
        purpose: a value of schema.Purpose.
        op: the operation that is issued.
        group_size: ranks of each group.
        groups: groups that send that.
        count: messages of each group.
        payload_bytes: sum of their payloads.
        padding_bytes: those of them that carry no data; None where that is not known.
        wire_bytes_per_rank: sum of the mean bytes that each rank of a group sends.
        between_hosts: bytes that the group's ranks send to other hosts, mean per rank of a group.
        sizes: payload bytes of each message to the number of such messages; empty where they are not known.
        exact: False where the count depends on the order of gradients or modules.
    """

    purpose: str
    op: str
    group_size: int
    groups: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a record
    payload_bytes: int
    padding_bytes: int | None
    wire_bytes_per_rank: int
    between_hosts: int
    sizes: Mapping[int, int]
    exact: bool


class Totals(NamedTuple):
    """The traffic of a step over all purposes.

    Attributes:
        rank_bytes: wire bytes of the rank that sends the most.
        host_bytes: bytes to other hosts, of the host that sends the most.
        inside_bytes: bytes to ranks of the same host, of the rank that sends the most of these.
        messages: of the rank that takes part in the most.
        median_bytes: median payload of all messages; None where sizes are not known.
        classes: of ranks with equal traffic.
    """

    rank_bytes: int
    host_bytes: int
    inside_bytes: int
    messages: int
    median_bytes: int | None
    classes: list[RankClass]


def traffic_of(sent: Iterable[Expectation], hosts: Hosts) -> list[Traffic]:
    """Return a row for each purpose, operation and list of groups in ``sent``, with what crosses between ``hosts``."""
    rows: dict[tuple[object, ...], Traffic] = {}
    for each in sent:
        groups = groups_of(each, hosts)
        wire = mean_wire_bytes(each, len(groups[0]))
        crossing = sent_by_link(each.issued_op, groups, wire, hosts).between
        ranks = sum(map(len, groups))
        sizes = Counter(sum(message) for message in each.payloads)
        row = Traffic(
            each.purpose,
            each.issued_op,
            len(groups[0]),
            len(groups),
            each.count,
            each.payload_bytes,
            each.padding_bytes,
            round(wire),
            round(sum(crossing.values()) / ranks),
            sizes if sizes.total() == each.count else Counter(),
            each.exact and each.bytes_exact,
        )
        # The same operation may have been requested, or replace another one.
        key = each.purpose, each.issued_op, each.group_size, each.groups
        rows[key] = _added(rows[key], row) if key in rows else row
    return list(rows.values())


def _added(first: Traffic, second: Traffic) -> Traffic:
    known = first.sizes and second.sizes
    return first._replace(
        count=first.count + second.count,
        payload_bytes=first.payload_bytes + second.payload_bytes,
        padding_bytes=None
        if first.padding_bytes is None or second.padding_bytes is None
        else first.padding_bytes + second.padding_bytes,
        wire_bytes_per_rank=first.wire_bytes_per_rank + second.wire_bytes_per_rank,
        between_hosts=first.between_hosts + second.between_hosts,
        sizes=Counter(first.sizes) + Counter(second.sizes) if known else Counter(),
        exact=first.exact and second.exact,
    )


def totals_of(sent: Iterable[Expectation], hosts: Hosts) -> Totals:
    """Return the traffic of a step of all rows of ``sent``, for the rank and the host that send the most."""
    listed = list(sent)
    by_host: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    inside: Counter[int] = Counter()
    along_rings: dict[tuple[Sequence[int], ...], int] = {}
    for each in listed:
        sizes.update(sum(message) for message in each.payloads)
        groups = tuple(groups_of(each, hosts))
        wire = mean_wire_bytes(each, len(groups[0]))
        if each.issued_op in DIRECT:
            by_link = sent_by_link(each.issued_op, groups, wire, hosts)
            inside.update(by_link.inside)
            by_host.update(by_link.between)
        else:
            # A rank sends all of it to the same one, so rows with the same groups need one look at the ranks.
            along_rings[groups] = along_rings.get(groups, 0) + round(wire)
    for groups, total in along_rings.items():
        by_link = sent_by_link(Op.ALL_REDUCE, groups, total, hosts)
        inside.update(by_link.inside)
        by_host.update(by_link.between)
    classes = rank_classes(listed, hosts)
    return Totals(
        max(each.sums.wire_bytes for each in classes),
        max(by_host.values(), default=0),
        max(inside.values(), default=0),
        max(each.sums.messages for each in classes),
        median_size(sizes),
        classes,
    )


def median_size(sizes: Mapping[int, int]) -> int | None:
    """Return the lower median of ``sizes``, which maps bytes to a number of messages; None of no message.

    >>> median_size({1: 1, 4: 1, 1000: 1})
    4
    """
    left = (sum(sizes.values()) + 1) // 2
    for size in sorted(sizes):
        left -= sizes[size]
        if left <= 0:
            return size
    return None


def histogram(rows: Iterable[Traffic]) -> dict[int, int]:
    """Return the messages of ``rows`` by size: lower bound, a power of two (0 for empty messages), to their number.

    >>> histogram([])
    {}
    """
    bins: Counter[int] = Counter()
    for row in rows:
        for size, number in row.sizes.items():
            bins[1 << size.bit_length() - 1 if size else 0] += number
    return dict(sorted(bins.items()))
