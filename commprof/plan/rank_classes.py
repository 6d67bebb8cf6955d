"""Compute the traffic of each rank in a step: classes of ranks with equal traffic, and their minimum, mean and maximum.

A rank counts with the mean of its group, with two exceptions. The first and the last pipeline stage send half as
many messages between stages as the other stages. In an all_to_all whose rows differ in length, a rank does not send
its own row. The root of a ring sends less than the other ranks. But the roots of broadcasts and reduces alternate,
so each rank counts with the mean there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Final, NamedTuple

from commprof.plan.hosts import Hosts, equal_ranks, groups_of
from commprof.requested.expectation import Expectation
from commprof.schema import Op, Purpose


class Sums(NamedTuple):
    """The sums of the traffic of one rank in a step.

    Attributes:
        messages: The number of collectives that the rank takes part in, plus the messages that it sends.
        payload_bytes: The sum of the payloads of these collectives and messages.
        wire_bytes: The number of bytes that the rank sends.
    """

    messages: int
    payload_bytes: int
    wire_bytes: int

    def plus(self, other: Sums) -> Sums:
        """Return the field-by-field sum of this object and ``other``."""
        return Sums(*map(add, self, other))


_NOTHING: Final = Sums(0, 0, 0)


class RankClass(NamedTuple):
    """A class of ranks with equal traffic.

    Attributes:
        first_rank: The lowest rank of the class.
        ranks: The number of ranks in the class.
        sums: The traffic of each rank of the class.
    """

    first_rank: int
    ranks: int
    sums: Sums


class Spread(NamedTuple):
    """The distribution of a value over all ranks.

    Attributes:
        least, mean, most: The minimum, the mean and the maximum over all ranks.
    """

    least: int
    mean: float
    most: int


def rank_classes(sent: Iterable[Expectation], hosts: Hosts) -> list[RankClass]:
    """Return the classes of the ranks of ``hosts``, which send ``sent``, in the order of their first ranks."""
    of_group: dict[Sequence[int], Sums] = {}
    of_rank: dict[int, Sums] = {}
    for each in sent:
        for group in groups_of(each, hosts):
            if len(group) < 2:
                continue
            positions = _of_positions(each, len(group))
            if isinstance(positions, Sums):
                of_group[group] = of_group.get(group, _NOTHING).plus(positions)
                continue
            for rank, sums in zip(group, positions, strict=True):
                of_rank[rank] = of_rank.get(rank, _NOTHING).plus(sums)
    members: dict[Sums, list[int]] = {}
    for groups, ranks in equal_ranks(of_group, hosts).items():
        shared = reduce(Sums.plus, (of_group[group] for group in groups), _NOTHING)
        for rank in ranks:
            members.setdefault(shared.plus(of_rank[rank]) if rank in of_rank else shared, []).append(rank)
    classes = [RankClass(min(ranks), len(ranks), sums) for sums, ranks in members.items()]
    return sorted(classes, key=lambda each: each.first_rank)


def spreads(classes: Iterable[RankClass]) -> dict[str, Spread]:
    """Return the spread of each field of :class:`Sums` over all ranks."""
    listed = list(classes)
    ranks = sum(each.ranks for each in listed)
    return {
        name: Spread(
            min(getattr(each.sums, name) for each in listed),
            sum(each.ranks * getattr(each.sums, name) for each in listed) / ranks,
            max(getattr(each.sums, name) for each in listed),
        )
        for name in Sums._fields
    }


def mean_wire_bytes(sent: Expectation, ranks: int) -> float:
    """Return the mean number of bytes that each of the ``ranks`` ranks of a group sends.

    The row of a send contains the messages of all ranks, and so its bytes are divided by ``ranks``.
    """
    return sent.wire_bytes / ranks if sent.issued_op == Op.SEND else sent.wire_bytes


def _of_positions(sent: Expectation, ranks: int) -> Sums | list[Sums]:
    """Return the sums of each rank of a group, in order, or a single ``Sums`` if those of all ranks are equal."""
    if sent.issued_op == Op.SEND:
        return [
            Sums(round(sent.count * share), round(sent.payload_bytes * share), round(sent.wire_bytes * share))
            for share in _shares_of_sends(sent, ranks)
        ]
    if sent.issued_op == Op.ALL_TO_ALL:
        rows = [each for each in sent.payloads if len(each) == ranks]
        if rows and len(rows) == len(sent.payloads):
            total = sum(map(sum, rows))
            wire = [total - sum(own) for own in zip(*rows, strict=True)]
            return [Sums(sent.count, sent.payload_bytes, each) for each in wire]
    return Sums(sent.count, sent.payload_bytes, round(sent.wire_bytes))


def _shares_of_sends(sent: Expectation, ranks: int) -> list[float]:
    if sent.purpose != Purpose.PIPELINE:
        return [1 / ranks] * ranks
    end, inner = 1 / (2 * (ranks - 1)), 1 / (ranks - 1)
    return [end, *[inner] * (ranks - 2), end]
