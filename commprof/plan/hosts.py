"""How ranks share hosts, how many bytes each host sends to others, and the rates of the links (``--hosts``, ``--links``).

Ranks are numbered host by host. Rings are assumed to connect the ranks of a group in rank order: each rank sends to the
next one, so of a group that spans several hosts one rank of each host sends to another host. NCCL may order them otherwise.
all_to_all, gather and scatter send to every other rank directly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from commprof.errors import UsageError
from commprof.quantities import bytes_per_second
from commprof.requested.expectation import Expectation
from commprof.schema import Op

USUAL_RANKS: Final = 8  # per host, where the user names no hosts
DIRECT: Final = (Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER)  # sent to every other rank, not along a ring

_EXAMPLE: Final = "intra=450GB/s,inter=8x50GB/s"
_LINKS: Final = re.compile(r"(?:(\d+)\s*x\s*)?(.*)")


class Hosts(NamedTuple):
    """Equal hosts.

    Attributes:
        count: hosts.
        ranks: ranks of each host.
    """

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a record
    ranks: int

    def __str__(self) -> str:
        return f"{self.count} host{'s' * (self.count > 1)} of {self.ranks} rank{'s' * (self.ranks > 1)}"


def parse_hosts(text: str | None, world: int) -> Hosts:
    """Return the hosts of ``world`` ranks: ``128x8`` is 128 hosts of 8 ranks. None means hosts of 8.

    Raises:
        UsageError: the text has another form, or the hosts do not have ``world`` ranks.
    """
    if text is None:
        ranks = min(USUAL_RANKS, world)
        if world % ranks:
            raise UsageError(
                f"--world {world} is not a multiple of {ranks} ranks per host; give --hosts, such as {world}x1"
            )
        return Hosts(world // ranks, ranks)
    match = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise UsageError(f"--hosts is {text!r}; expected hosts x ranks of each, such as 128x8")
    hosts = Hosts(int(match[1]), int(match[2]))
    if hosts.count * hosts.ranks != world:
        raise UsageError(
            f"--hosts {text} has {hosts.count * hosts.ranks} ranks and --world {world}; change one of them"
        )
    return hosts


class Sent(NamedTuple):
    """Bytes that are sent, by the kind of link.

    Attributes:
        inside: by rank, to ranks of the same host.
        between: by host, to other hosts.
    """

    inside: Counter[int]
    between: Counter[int]


def sent_by_link(op: str, groups: Iterable[Sequence[int]], wire_bytes: float, hosts: Hosts) -> Sent:
    """Return what ranks and hosts send; those that send nothing are missing.

    Args:
        op: a value of schema.Op.
        groups: the ranks of each group that sends that.
        wire_bytes: that each rank of a group sends, on average.
        hosts: of all ranks.
    """
    sent = Sent(Counter(), Counter())
    for group in groups:
        inside, between = _shares(op in DIRECT, tuple(group), hosts.ranks)
        for share, ranks in inside:
            sent.inside.update(dict.fromkeys(ranks, round(wire_bytes * share)))
        for host, share, ranks_of_host in between:
            sent.between[host] += ranks_of_host * round(wire_bytes * share)
    return sent


@lru_cache(maxsize=64)  # most messages of a step have the same groups
def _shares(
    direct: bool, group: tuple[int, ...], ranks: int
) -> tuple[list[tuple[float, list[int]]], list[tuple[int, float, int]]]:
    """Return what part of its bytes each rank of ``group`` sends inside its host, and each host to others.

    The first list has shares with the ranks that send so much inside; the second one hosts, the share that a rank sends to
    other hosts, and how many of its ranks do.
    """
    if len(group) < 2:
        return [], []
    places = [rank // ranks for rank in group]
    of_host = Counter(places)
    inside: dict[float, list[int]] = {}
    between: Counter[tuple[int, float]] = Counter()
    for rank, host, following in zip(group, places, [*places[1:], places[0]], strict=True):
        share = (of_host[host] - 1) / (len(group) - 1) if direct else float(host == following)
        if share:
            inside.setdefault(share, []).append(rank)
        if share < 1:
            between[host, 1 - share] += 1
    return list(inside.items()), [(host, share, count) for (host, share), count in between.items()]


class Place(NamedTuple):
    """Where the ranks of a group are.

    Attributes:
        ranks: of the group.
        hosts: that have some of them.
        local: the most ranks of the group on one host.
        sharing: groups that send the same at the same time over the links of a host, this one included.
    """

    ranks: int
    hosts: int
    local: int
    sharing: int


def places_of(groups: Iterable[Sequence[int]], hosts: Hosts) -> list[Place]:
    """Return the place of each of ``groups``, which send the same at the same time."""
    counts = [Counter(rank // hosts.ranks for rank in group) for group in groups]
    sharing = Counter(host for each in counts if len(each) > 1 for host in each)
    return [
        Place(
            each.total(), len(each), max(each.values()), max((sharing[host] for host in each), default=1) or 1
        )
        for each in counts
    ]


def groups_of(sent: Expectation, hosts: Hosts) -> Sequence[Sequence[int]]:
    """Return the ranks of each group that sends ``sent``."""
    if sent.groups:
        return sent.groups
    world = hosts.count * hosts.ranks
    size = sent.group_size or world
    return [range(first, first + size) for first in range(0, world, size)]


def equal_ranks(groups: Iterable[Sequence[int]], hosts: Hosts) -> dict[tuple[Sequence[int], ...], list[int]]:
    """Return the ranks of ``hosts`` by the ``groups`` that they are in; messages of large jobs are few, and ranks many."""
    listed = list(groups)
    numbers: list[list[int]] = [[] for _ in range(hosts.count * hosts.ranks)]
    for number, group in enumerate(listed):
        for rank in group:
            numbers[rank].append(number)
    by_groups: dict[tuple[int, ...], list[int]] = {}
    for rank, each in enumerate(numbers):
        by_groups.setdefault(tuple(each), []).append(rank)
    return {tuple(listed[number] for number in each): ranks for each, ranks in by_groups.items()}


class Links(NamedTuple):
    """Rates in bytes per second; None where one is not given.

    Attributes:
        intra: of one rank to others of its host.
        inter: of one host to other hosts, all of its links together.
    """

    intra: float | None = None
    inter: float | None = None


def parse_links(text: str) -> Links:
    """Parse ``intra=450GB/s,inter=8x50GB/s``: the rate of a rank inside its host, and links x rate of a host.

    >>> parse_links("intra=450GB/s,inter=8x400Gbit/s")
    Links(intra=450000000000.0, inter=400000000000.0)

    Raises:
        UsageError: the text has another form.
    """
    rates: dict[str, float] = {}
    for word in text.split(","):
        name, equals, rate = word.strip().partition("=")
        match = _LINKS.fullmatch(rate.strip())
        of_one = bytes_per_second(match[2]) if match else None
        if not equals or name not in Links._fields or name in rates or match is None or of_one is None:
            raise UsageError(
                f"--links is {text!r}, with {word.strip()!r}; expected {_EXAMPLE}, in GB/s (bytes) or Gbit/s and above 0"
            )
        rates[name] = int(match[1] or 1) * of_one
        if not rates[name]:
            raise UsageError(f"--links is {text!r}, with {word.strip()!r}; expected at least one link")
    return Links(**rates)
