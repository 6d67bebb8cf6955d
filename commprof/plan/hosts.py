"""Place ranks on hosts, count the bytes between hosts, and read the rates of the links (``--hosts``, ``--links``).

Ranks are numbered host by host. Rings are assumed to connect the ranks of a group in rank order, so that each rank
sends to the next rank. If a group spans several hosts, one rank of each host sends to a different host. NCCL may
use a different order. all_to_all, gather and scatter send to every other rank directly.
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

USUAL_RANKS: Final = 8  # ranks per host if the user names no hosts
DIRECT: Final = (Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER)  # sent to every other rank, not along a ring

_EXAMPLE: Final = "intra=450GB/s,inter=8x50GB/s"
_LINKS: Final = re.compile(r"(?:(\d+)\s*x\s*)?(.*)")


class Hosts(NamedTuple):
    """A number of hosts that have equally many ranks.

    Attributes:
        count: The number of hosts.
        ranks: The number of ranks on each host.
    """

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a record
    ranks: int

    def __str__(self) -> str:
        return f"{self.count} host{'s' * (self.count > 1)} of {self.ranks} rank{'s' * (self.ranks > 1)}"


def parse_hosts(text: str | None, world: int) -> Hosts:
    """Return the hosts of ``world`` ranks: ``128x8`` is 128 hosts of 8 ranks. None means hosts of 8.

    Raises:
        UsageError: The text does not have this form, or the hosts do not have ``world`` ranks.
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
    """The bytes that are sent over each kind of link.

    Attributes:
        inside: The bytes that each rank sends to ranks of its own host, by rank.
        between: The bytes that each host sends to other hosts, by host.
    """

    inside: Counter[int]
    between: Counter[int]


def sent_by_link(op: str, groups: Iterable[Sequence[int]], wire_bytes: float, hosts: Hosts) -> Sent:
    """Return the bytes that ranks and hosts send. Ranks and hosts that send nothing are not included.

    Args:
        op: A value of schema.Op.
        groups: The ranks of each group that sends the messages.
        wire_bytes: The mean number of bytes that a rank of a group sends.
        hosts: The hosts of all ranks.
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
    """Return the share of its bytes that each rank of ``group`` sends inside its host, and the share to other hosts.

    Args:
        direct: Whether each rank sends to every other rank of the group directly, and not along a ring.
        group: The ranks of the group.
        ranks: The number of ranks on each host.

    Returns:
        Two lists. An item of the first list is a share and the ranks that send this share inside their host. An
        item of the second list is a host, the share that a rank sends to other hosts, and the number of ranks of
        this host that send this share.
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
    """The distribution of the ranks of a group over hosts.

    Attributes:
        ranks: The number of ranks of the group.
        hosts: The number of hosts that have ranks of the group.
        local: The maximum number of ranks of the group on one host.
        sharing: The number of groups, including this group, that send the same messages at the same time over the
            links of a host.
    """

    ranks: int
    hosts: int
    local: int
    sharing: int


def places_of(groups: Iterable[Sequence[int]], hosts: Hosts) -> list[Place]:
    """Return the place of each of ``groups``, which send the same messages at the same time."""
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
    """Return the ranks of ``hosts`` by the ``groups`` that they belong to.

    Large jobs have many ranks, but few kinds of messages. So callers process each set of groups only once.
    """
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
    """The rates of links in bytes per second. A rate is None if it is not given.

    Attributes:
        intra: The rate of one rank to other ranks of its host.
        inter: The rate of one host to other hosts, over all of its links together.
    """

    intra: float | None = None
    inter: float | None = None


def parse_links(text: str) -> Links:
    """Parse the rate of a rank inside its host and the links x rate of a host: ``intra=450GB/s,inter=8x50GB/s``.

    >>> parse_links("intra=450GB/s,inter=8x400Gbit/s")
    Links(intra=450000000000.0, inter=400000000000.0)

    Raises:
        UsageError: The text does not have this form.
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
