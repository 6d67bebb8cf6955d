"""Groups the communicators of all ranks into families, and finds the rank of each process in the job.

A family is one communicator of the job. Its members are the entries of the processes that use this communicator. The
world is the largest family that contains every process once. The ranks in the world are the global ranks. A
communicator that matches two families gets no family, but a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from commprof.nccl.state.communicators import Communicator

FamilyKey = tuple[object, ...]

LOOK_ALIKE: Final = "other communicators have the same number of ranks, and no commId distinguishes them"
REPEATED: Final = "two processes have the same rank and commId: a log may have been given twice"
INCOMPLETE: Final = "not every rank of the communicator is in the logs, and no commId shows its other members"
NO_PARENT: Final = "the communicator that it was split from has no init line"
PARENT_UNKNOWN: Final = "the family of the communicator that it was split from is not known"
RENUMBERED: Final = (
    "two communicators hold every process and number them differently: the job may have restarted"
)
CUT_OUT: Final = "the largest communicator of the job was split from one that the logs do not show"
CROWDED: Final = "several ranks share a process and a device, so they cannot be distinguished"


class Membership(NamedTuple):
    """The result of :func:`find_families`: the indices of the members of each family, and the ambiguous indices.

    An ambiguous communicator matches more than one family.
    """

    families: tuple[tuple[int, ...], ...]
    ambiguous: tuple[int, ...]


class _Logs(NamedTuple):
    """Facts about all communicators of the logs together.

    Attributes:
        processes: The processes with a rank in a communicator.
        largest: The largest number of ranks of a communicator.
        attempts: For each process, the number of earlier processes of the same file on the same GPU. A restart starts a
            new process on a GPU that an earlier process used. Two processes that run at the same time use two GPUs.
    """

    processes: set[int]
    largest: int
    attempts: dict[int, int]

    @classmethod
    def of(cls, communicators: Sequence[Communicator]) -> _Logs:
        """Collect the facts from the communicators of the logs, in the order of the logs."""
        ranked = [communicator for communicator in communicators if communicator.rank is not None]
        cards: dict[tuple[object, ...], int] = {}
        attempts: dict[int, int] = {}
        for communicator in ranked:
            if communicator.process in attempts:
                continue
            card = (communicator.file, communicator.host, communicator.bus_id, communicator.cuda_device)
            attempts[communicator.process] = cards.get(card, 0)
            cards[card] = attempts[communicator.process] + 1
        return cls(
            {communicator.process for communicator in ranked},
            max((communicator.nranks or 0 for communicator in ranked), default=0),
            attempts,
        )


def find_families(communicators: Sequence[Communicator]) -> Membership:
    """Group communicators into families, and set ``family`` or ``family_reason`` on each communicator.

    Communicators with a commId are grouped by commId. Split communicators are grouped by parent, number of the split
    and color. Other communicators are grouped by size and order of appearance within each process. Such a group is a
    family only if it has every rank exactly once. If two members of a group have the same rank, several communicators
    look alike. These communicators get no family, and neither do communicators that were split from them.
    """
    members: dict[FamilyKey, list[Communicator]] = {}
    keys: dict[int, FamilyKey] = {}
    earlier: dict[FamilyKey, int] = {}
    for communicator in communicators:
        key = _family_key(communicator, keys, earlier)
        if key is not None:
            keys[communicator.index] = key
            members.setdefault(key, []).append(communicator)
    families: list[tuple[int, ...]] = []
    ambiguous: list[int] = []
    refused: set[FamilyKey] = set()
    logs = _Logs.of(communicators)
    for key, group in members.items():
        reason = _objection(key, group, logs, refused)
        attempts = _attempts(group, logs) if reason == LOOK_ALIKE and key[0] == ("plain",) else [group]
        if reason is not None and len(attempts) == 1:
            refused.add(key)
            for communicator in group:
                communicator.family_reason = reason
            ambiguous.extend(communicator.index for communicator in group)
            continue
        for family in attempts:
            for communicator in family:
                communicator.family = len(families)
            families.append(tuple(communicator.index for communicator in family))
    return Membership(tuple(families), tuple(ambiguous))


def _objection(
    key: FamilyKey,
    group: Sequence[Communicator],
    logs: _Logs,
    refused: set[FamilyKey],
) -> str | None:
    """Return the reason why the communicators of one key may be several families; None if they are one family."""
    identity = key[0]
    assert isinstance(identity, tuple)
    if identity[0] == "split" and identity[1] in refused:
        return PARENT_UNKNOWN
    ranks = {communicator.rank for communicator in group}
    if len(ranks) < len(group):
        return REPEATED if identity[0] == "id" else LOOK_ALIKE
    if identity[0] in ("plain", "grow") and not _is_complete(group):
        # The first communicators with the largest size in the logs are assumed to be one communicator if every process
        # has one of them. The notes of the parse mention this assumption.
        if key[2] == 0 and group[0].nranks == logs.largest and {c.process for c in group} == logs.processes:
            return None
        return INCOMPLETE
    return None


def _attempts(group: list[Communicator], logs: _Logs) -> list[list[Communicator]]:
    """Divide ``group`` by start of the job.

    If a start does not have every rank exactly once, ``group`` is not divided.
    """
    by_attempt: dict[int, list[Communicator]] = {}
    for communicator in group:
        by_attempt.setdefault(logs.attempts[communicator.process], []).append(communicator)
    return (
        list(by_attempt.values())
        if all(_is_complete(its_communicators) for its_communicators in by_attempt.values())
        else [group]
    )


def _is_complete(group: Sequence[Communicator]) -> bool:
    """Return whether the group has every rank exactly once."""
    size = group[0].nranks or 0
    return len(group) == size and {communicator.rank for communicator in group} == set(range(size))


def _family_key(
    communicator: Communicator, keys: dict[int, FamilyKey], earlier: dict[FamilyKey, int]
) -> FamilyKey | None:
    """Return a key that is equal in all members of one family and differs between families; None if unknown."""
    if communicator.rank is None or communicator.nranks is None:
        return None
    if communicator.api == "ncclCommGrow":
        # Older versions print the parent, newer ones a commId.
        identity: FamilyKey = ("grow",)
    elif communicator.comm_id is not None:
        identity = ("id", communicator.comm_id)
    elif communicator.color is not None:
        if communicator.parent is None or communicator.parent not in keys:
            communicator.family_reason = NO_PARENT
            return None
        identity = ("split", keys[communicator.parent], communicator.split, communicator.color)
    else:
        identity = ("plain",)
    # The rank is part of the use, because a process may have several ranks. The uses are counted, because a repeated
    # split with the same color has the same commId.
    use = ("use", communicator.process, communicator.rank, communicator.nranks, identity)
    nth = earlier.get(use, 0)
    earlier[use] = nth + 1
    return (identity, communicator.nranks, nth)


class World(NamedTuple):
    """The family that determines the global ranks of one job: its size, and the number of its ranks in the logs."""

    nranks: int
    members: int


# A process, with device and bus id if the process has several ranks.
Seat = tuple[int, int | None, str | None]


def find_global_ranks(communicators: Sequence[Communicator], membership: Membership) -> tuple[World, ...]:
    """Set ``global_rank`` or ``global_rank_reason`` on each communicator, and return the world of each job in the logs.

    Processes that share a family belong to one job. Device and bus distinguish the ranks of a process with several
    ranks. Namesakes are processes with equal host and pid in two files. They count as two processes if a family
    contains both, and as one process otherwise.
    """
    seats = _seats(communicators, membership)
    worlds = []
    for job in _jobs(communicators, membership):
        known: dict[Seat, int | None] = {
            seats[c.index]: c.global_rank for c in job if c.global_rank is not None
        }
        largest = _worlds(job, communicators, membership, seats)
        candidates = [family for family in largest if not any(member.parent_missing for member in family)]
        numbering = {tuple((seats[c.index], c.rank) for c in _by_rank(world)) for world in candidates}
        reason = None
        if len(numbering) > 1:
            reason = RENUMBERED
        elif candidates:
            world = candidates[0]
            worlds.append(World(world[0].nranks or len(world), len(world)))
            known = {seats[member.index]: member.rank for member in world} | known
        elif largest:
            reason = CUT_OUT
        elif _is_crowded(job, membership, seats):
            reason = CROWDED
        for communicator in job:
            if communicator.global_rank is None:
                communicator.global_rank = known.get(seats[communicator.index])
                communicator.global_rank_reason = reason
    return tuple(worlds)


def _by_rank(family: Sequence[Communicator]) -> list[Communicator]:
    return sorted(family, key=lambda communicator: communicator.rank or 0)


def _identities(communicators: Sequence[Communicator], membership: Membership) -> dict[int, int]:
    """Return the identity of each process: its first namesake, or itself if a family contains two of the namesakes."""
    names = {c.process: c.namesake for c in communicators}
    distinct = set()
    for family in membership.families:
        processes = {communicators[index].process for index in family}
        name_counts = Counter(names[process] for process in processes)
        distinct |= {name for name, count in name_counts.items() if count > 1}
    return {process: process if name in distinct else name for process, name in names.items()}


def _seats(communicators: Sequence[Communicator], membership: Membership) -> dict[int, Seat]:
    """Return the seat of each communicator, by index."""
    identities = _identities(communicators, membership)
    seat_counts = Counter(
        (number, identities[communicators[index].process])
        for number, family in enumerate(membership.families)
        for index in family
    )
    crowded = {process for (_, process), count in seat_counts.items() if count > 1}
    return {
        c.index: (
            (identities[c.process], c.cuda_device, c.bus_id)
            if identities[c.process] in crowded
            else (identities[c.process], None, None)
        )
        for c in communicators
    }


def _is_crowded(job: Sequence[Communicator], membership: Membership, seats: Mapping[int, Seat]) -> bool:
    """Return whether two ranks of one family share a seat."""
    for number in {c.family for c in job if c.family is not None}:
        its_seats = [seats[index] for index in membership.families[number]]
        if len(set(its_seats)) < len(its_seats):
            return True
    return False


def _jobs(communicators: Sequence[Communicator], membership: Membership) -> list[list[Communicator]]:
    """Return the communicators of each job. Processes that share a family belong to the same job."""
    identities = _identities(communicators, membership)
    joined = {person: person for person in identities.values()}

    def root(process: int) -> int:
        while joined[process] != process:
            joined[process] = joined[joined[process]]
            process = joined[process]
        return process

    for family in membership.families:
        first = root(identities[communicators[family[0]].process])
        for index in family[1:]:
            joined[root(identities[communicators[index].process])] = first
    jobs: dict[int, list[Communicator]] = {}
    for communicator in communicators:
        jobs.setdefault(root(identities[communicator.process]), []).append(communicator)
    return list(jobs.values())


def _worlds(
    job: Sequence[Communicator],
    communicators: Sequence[Communicator],
    membership: Membership,
    seats: Mapping[int, Seat],
) -> list[list[Communicator]]:
    """Return the largest families of ``job`` that have every seat once, the earliest family first."""
    taken = {seats[c.index] for c in job if c.rank is not None or seats[c.index][1:] == (None, None)}
    numbers = sorted({c.family for c in job if c.family is not None})
    complete: list[list[Communicator]] = []
    for number in numbers:
        family = [communicators[index] for index in membership.families[number]]
        its_seats = [seats[member.index] for member in family]
        if len(its_seats) == len(taken) and set(its_seats) == taken:
            complete.append(family)
    largest = max((family[0].nranks or 0 for family in complete), default=0)
    return [family for family in complete if family[0].nranks == largest]
