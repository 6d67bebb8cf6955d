"""Sum the messages of a step per purpose and operation: sizes, and bytes per rank, inside a host and between hosts."""

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
        purpose: A value of schema.Purpose.
        op: The operation that is issued.
        group_size: The number of ranks of each group.
        groups: The number of groups that send these messages.
        count: The number of messages of each group.
        payload_bytes: The sum of the payloads of the messages of a group.
        padding_bytes: The part of the payload bytes that is padding, or None if it is not known.
        wire_bytes_per_rank: The bytes that a rank of a group sends in all of these messages, on average.
        between_hosts: The bytes that the ranks of the groups send to other hosts, as a mean per rank.
        sizes: The number of messages by their payload bytes. Empty if the sizes are not known.
        exact: Whether the count and the bytes are exact. They are not if they depend, for example, on the order
            of gradients or modules.
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
        rank_bytes: The wire bytes of the rank that sends the most.
        host_bytes: The bytes to other hosts from the host that sends the most bytes to other hosts.
        inside_bytes: The maximum over all ranks of the bytes that a rank sends to ranks of its host.
        messages: The maximum over all ranks of the number of messages that a rank takes part in.
        median_bytes: The median payload of all messages, or None if sizes are not known.
        classes: The classes of ranks with equal traffic.
    """

    rank_bytes: int
    host_bytes: int
    inside_bytes: int
    messages: int
    median_bytes: int | None
    classes: list[RankClass]


def traffic_of(sent: Iterable[Expectation], hosts: Hosts) -> list[Traffic]:
    """Return a row for each purpose, operation and list of groups in ``sent``, with the bytes between ``hosts``."""
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
        # Rows are added up whether their operation was requested or replaces a different operation.
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
    """Return the traffic of a step over all rows of ``sent``, for the rank and the host that send the most."""
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
            # On a ring a rank sends all bytes to one neighbor. So the bytes of rows with the same groups are added
            # up first, and the ranks of these groups are examined only once.
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
    """Return the lower median of ``sizes``, which maps bytes to a number of messages, or None without messages.

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
    """Return the number of messages in ``rows`` by the lower bound of their size.

    The bound is a power of two in bytes, or 0 for empty messages.

    >>> histogram([])
    {}
    """
    bins: Counter[int] = Counter()
    for row in rows:
        for size, number in row.sizes.items():
            bins[1 << size.bit_length() - 1 if size else 0] += number
    return dict(sorted(bins.items()))
