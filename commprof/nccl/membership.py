"""Which communicators are one and the same on different ranks, and which rank of the job each process is.

A family is one communicator of the job: its members are the uses of it in each process. The world is the largest
family that holds every process once; its ranks are the global ranks. Nothing is guessed: communicators that fit two
families stay without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from commprof.nccl.communicators import Communicator

FamilyKey = tuple[object, ...]


class Membership(NamedTuple):
    """What :func:`find_families` found: members of each family, and the indices that fit more than one."""

    families: tuple[tuple[int, ...], ...]
    ambiguous: tuple[int, ...]


def find_families(communicators: Sequence[Communicator]) -> Membership:
    """Group communicators into families, set ``family`` on each member.

    By commId where there is one; by parent, number of the split and colour for split communicators; else by size and
    order of appearance within each process. Two members with one rank in a family that has no commId mean that two
    communicators look alike: then none of them gets a family.
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
    for group in members.values():
        ranks = [communicator.rank for communicator in group]
        if len(set(ranks)) < len(ranks):
            ambiguous.extend(communicator.index for communicator in group)
            continue
        for communicator in group:
            communicator.family = len(families)
        families.append(tuple(communicator.index for communicator in group))
    return Membership(tuple(families), tuple(ambiguous))


def _family_key(
    communicator: Communicator, keys: dict[int, FamilyKey], earlier: dict[FamilyKey, int]
) -> FamilyKey | None:
    """What is equal in all members of one family, and differs between families; None where that is not known."""
    if communicator.rank is None or communicator.nranks is None:
        return None
    if communicator.comm_id is not None:
        identity: FamilyKey = ("id", communicator.comm_id)
    elif communicator.color is not None:
        if communicator.parent is None or communicator.parent not in keys:
            return None
        identity = ("split", keys[communicator.parent], communicator.split, communicator.color)
    else:
        identity = ("plain", communicator.nranks)
    # A process may hold several ranks, hence the rank; and a split with the same colour repeats its commId.
    use = ("use", communicator.process, communicator.rank, identity)
    nth = earlier.get(use, 0)
    earlier[use] = nth + 1
    return (identity, communicator.nranks, nth)


class World(NamedTuple):
    """The family that gives the global ranks of one job: its size, and how many of its ranks the logs hold."""

    nranks: int
    members: int


# A process, and the CUDA device where one process holds several ranks.
Seat = tuple[int, int | None]


def find_global_ranks(communicators: Sequence[Communicator], membership: Membership) -> tuple[World, ...]:
    """Set ``global_rank`` wherever it can be known; returns the world of each job in the logs.

    Processes that share a family belong to one job. A process with several ranks is told apart by CUDA device.
    """
    seats = _seats(communicators, membership)
    worlds = []
    for job in _jobs(communicators, membership):
        known: dict[Seat, int | None] = {
            seats[c.index]: c.global_rank for c in job if c.global_rank is not None
        }
        world = _find_world(job, communicators, membership, seats)
        if world:
            worlds.append(World(world[0].nranks or len(world), len(world)))
            known = {seats[member.index]: member.rank for member in world} | known
        for communicator in job:
            if communicator.global_rank is None:
                communicator.global_rank = known.get(seats[communicator.index])
    return tuple(worlds)


def _seats(communicators: Sequence[Communicator], membership: Membership) -> dict[int, Seat]:
    """The seat of each communicator, by index."""
    held = Counter(
        (number, communicators[index].process)
        for number, family in enumerate(membership.families)
        for index in family
    )
    crowded = {process for (_, process), count in held.items() if count > 1}
    return {c.index: (c.process, c.cuda_device if c.process in crowded else None) for c in communicators}


def _jobs(communicators: Sequence[Communicator], membership: Membership) -> list[list[Communicator]]:
    """The communicators of each job: processes joined by families."""
    joined = {communicator.process: communicator.process for communicator in communicators}

    def root(process: int) -> int:
        while joined[process] != process:
            joined[process] = joined[joined[process]]
            process = joined[process]
        return process

    for family in membership.families:
        first = root(communicators[family[0]].process)
        for index in family[1:]:
            joined[root(communicators[index].process)] = first
    jobs: dict[int, list[Communicator]] = {}
    for communicator in communicators:
        jobs.setdefault(root(communicator.process), []).append(communicator)
    return list(jobs.values())


def _find_world(
    job: Sequence[Communicator],
    communicators: Sequence[Communicator],
    membership: Membership,
    seats: Mapping[int, Seat],
) -> list[Communicator]:
    """The largest family of ``job`` that holds every seat once, the earliest where several do; else empty."""
    taken = {seats[c.index] for c in job}
    numbers = {c.family for c in job if c.family is not None}
    families = [[communicators[index] for index in membership.families[number]] for number in sorted(numbers)]
    for family in sorted(families, key=lambda members: -(members[0].nranks or 0)):
        held = [seats[member.index] for member in family]
        if len(held) == len(taken) and set(held) == taken:
            return family
    return []
