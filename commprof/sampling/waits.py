"""The wait graph: the calls in which ranks are blocked, and the ranks that have not issued these calls. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from commprof.align.ranks.agreement import Difference, IssuedCall, conflict, first_difference
from commprof.align.ranks.group_orders import (
    Course,
    GroupCall,
    OrderDifference,
    order_differences,
    shared_groups,
)
from commprof.align.ranks.stated_splits import first_unequal_split
from commprof.sampling.calls import Call, GroupFacts, RankCalls, Stage
from commprof.schema import Op, format_ranks


class Wait(NamedTuple):
    """One collective or message that cannot complete.

    Attributes:
        group: The process group.
        call: The call as the lowest waiting rank issued it.
        waiting: The ranks that are blocked in the call, each with the time in ns on its own clock at which it issued
            the call.
        missing: The ranks that must issue the call and have not issued it.
        finished: The ranks that have issued the call and continued.
        absent: The ranks of the group that have no file, so that their state is not known.
        known: False if it is not known whether the ranks in ``waiting`` wait for the call (on a device or in C++).
    """

    group: GroupFacts
    call: Call
    waiting: Mapping[int, int]
    missing: tuple[int, ...]
    finished: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    known: bool = True


class Party(NamedTuple):
    """Ranks that issued the same collective at one position of a group."""

    ranks: tuple[int, ...]
    call: Call


class Parting(NamedTuple):
    """The first position of a group at which ranks issued different collectives. The largest party comes first."""

    group: GroupFacts
    pg_seq: int
    parties: tuple[Party, ...]


class Standing(NamedTuple):
    """The progress of the ranks of one group: the last collective of each rank, or None before its first."""

    group: GroupFacts
    last: Mapping[int, Call | None]

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equal progress."""
        return len({call.pg_seq if call else -1 for call in self.last.values()}) <= 1


@dataclass(slots=True)
class GroupCalls:
    """The collectives of one group by rank and number, and the ranks of the group that have records.

    A call that raised an exception is left out, because no other rank takes part in the call.
    """

    facts: GroupFacts
    members: tuple[int, ...] = ()
    by_seq: dict[int, dict[int, tuple[Call, Stage]]] = field(default_factory=dict)  # rank -> pg_seq -> call

    def last(self, rank: int) -> Call | None:
        """Return the collective with the highest number that ``rank`` has issued, or None before the first."""
        calls = self.by_seq.get(rank)
        return calls[max(calls)][0] if calls else None

    def reached(self, rank: int) -> int:
        """Return the number of the last collective that ``rank`` has issued, or -1 before the first."""
        return max(self.by_seq.get(rank, {}), default=-1)


def group_calls(ranks: Sequence[RankCalls]) -> list[GroupCalls]:
    """Return the collectives of every group that a rank described, in order of the group names."""
    groups: dict[str, GroupCalls] = {}
    for rank in ranks:
        for facts in rank.groups.values():
            groups.setdefault(facts.pg, GroupCalls(facts))
    present = {rank.rank for rank in ranks}
    for group_of in groups.values():
        group_of.members = tuple(number for number in group_of.facts.ranks if number in present)
    for rank in ranks:
        for call, stage in zip(rank.calls, rank.stages(), strict=True):
            group = groups.get(call.what.pg)
            if group is not None and not call.what.is_p2p and not call.raised:
                group.by_seq.setdefault(rank.rank, {})[call.pg_seq] = call, stage
    return [groups[name] for name in sorted(groups, key=lambda name: (len(name), name))]


def standings(groups: Sequence[GroupCalls]) -> list[Standing]:
    """Return the progress of the ranks of each group. Unused groups and groups of one rank are left out."""
    return [
        Standing(group.facts, {rank: group.last(rank) for rank in group.members})
        for group in groups
        if len(group.facts.ranks) > 1 and group.by_seq
    ]


def find_waits(ranks: Sequence[RankCalls], groups: Sequence[GroupCalls]) -> list[Wait]:
    """Return the blocked collectives, and the messages in which a rank is blocked."""
    present = {rank.rank for rank in ranks}
    waits = [wait for group in groups for wait in _collective_waits(group, present)]
    by_rank = {rank.rank: rank for rank in ranks}
    facts = {group.facts.pg: group.facts for group in groups}
    for rank in ranks:
        messages = [call for call in rank.inside() if call.what.is_p2p and call.what.pg in facts]
        waits += [_message_wait(rank, call, facts[call.what.pg], by_rank) for call in messages]
    return waits


def _collective_waits(group: GroupCalls, present: set[int]) -> list[Wait]:
    absent = tuple(rank for rank in group.facts.ranks if rank not in present)
    inside: dict[int, dict[int, Call]] = {}
    for rank, calls in group.by_seq.items():
        for seq, (call, stage) in calls.items():
            if stage is Stage.INSIDE:
                inside.setdefault(seq, {})[rank] = call
    known = bool(inside)
    if not known:
        inside = _unfinished(group)
    waits = []
    for seq, calls_of in sorted(inside.items()):
        missing = tuple(rank for rank in group.members if group.reached(rank) < seq)
        finished = tuple(
            rank
            for rank in group.members
            if rank not in calls_of and rank not in missing and seq in group.by_seq.get(rank, {})
        )
        first = calls_of[min(calls_of)]
        since = {rank: call.issue_ns for rank, call in sorted(calls_of.items())}
        waits.append(Wait(group.facts, first, since, missing, finished, absent, known))
    return waits


def _unfinished(group: GroupCalls) -> dict[int, dict[int, Call]]:
    """Return the calls of the first collective that some ranks have not issued, if its completion is not known.

    The calls are by number and rank. The result is empty if no rank has issued this collective.
    """
    if len(group.members) < 2:
        return {}
    seq = min(group.reached(rank) for rank in group.members) + 1
    calls_by_rank = {
        rank: calls[seq][0]
        for rank, calls in group.by_seq.items()
        if seq in calls and calls[seq][1] is Stage.UNKNOWN
    }
    return {seq: calls_by_rank} if calls_by_rank else {}


def _message_wait(rank: RankCalls, call: Call, group: GroupFacts, by_rank: Mapping[int, RankCalls]) -> Wait:
    """Return the wait of ``rank`` in a send or recv. The peer is missing if it has not issued the matching call."""
    other = by_rank.get(call.what.peer)
    since = {rank.rank: call.issue_ns}
    if call.what.peer < 0:
        members = [by_rank[r] for r in group.ranks if r in by_rank and r != rank.rank]
        sent = any(_answers(member, rank, call) for member in members)
        return Wait(group, call, since, () if sent else tuple(member.rank for member in members))
    if other is None:
        return Wait(group, call, since, (), absent=(call.what.peer,))
    issued = _has_issued(rank, other, call)
    return Wait(group, call, since, () if issued else (other.rank,), (other.rank,) if issued else ())


def _has_issued(rank: RankCalls, other: RankCalls, call: Call) -> bool:
    """Return whether ``other`` has issued the call that matches ``call``. The n-th recv matches the n-th send."""
    theirs = [
        c for c in other.calls if _is_other_side(c, call) and c.what.peer in (rank.rank, -1) and not c.raised
    ]
    if not (rank.whole and other.whole) or any(c.what.peer < 0 for c in theirs):
        return _answers(other, rank, call)
    same = (c for c in rank.calls if c.what[:3] == call.what[:3] and c.what.peer == call.what.peer)
    return sum(1 for c in same if c.pg_seq <= call.pg_seq and not c.raised) <= len(theirs)


def _answers(other: RankCalls, rank: RankCalls, call: Call) -> bool:
    """Return whether ``other`` has issued a matching message with ``rank`` that is still in progress."""
    return any(
        _is_other_side(theirs, call) and theirs.what.peer in (rank.rank, -1) and stage is not Stage.DONE
        for theirs, stage in zip(other.calls, other.stages(), strict=True)
    )


def _is_other_side(theirs: Call, call: Call) -> bool:
    wanted = Op.RECV if call.what.op == Op.SEND else Op.SEND
    return theirs.what.op == wanted and theirs.what.pg == call.what.pg


def find_parting(group: GroupCalls, up_to: int) -> Parting | None:
    """Return the first position up to ``up_to`` at which ranks of ``group`` issued different collectives, or None."""
    return _first_parting(
        group,
        up_to,
        lambda call: call.what.agreed,
        lambda one, other: conflict(one.what.agreed, other.what.agreed),
    )


def find_sites(group: GroupCalls, up_to: int) -> Parting | None:
    """Return the first position up to ``up_to`` at which ranks of ``group`` have different call sites, or None.

    This is only a hint, because ranks may issue the same collective from different call sites.
    """
    return _first_parting(group, up_to, lambda call: call.site, lambda one, other: one.site != other.site)


def _first_parting(
    group: GroupCalls, up_to: int, key: Callable[[Call], object], differ: Callable[[Call, Call], bool]
) -> Parting | None:
    numbers = sorted({seq for calls in group.by_seq.values() for seq in calls if seq <= up_to})
    for seq in numbers:
        parties: dict[object, list[int]] = {}
        for rank in group.members:
            if seq in group.by_seq.get(rank, {}):
                parties.setdefault(key(group.by_seq[rank][seq][0]), []).append(rank)
        ordered = sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks))
        ordered_parties = tuple(Party(tuple(ranks), group.by_seq[ranks[0]][seq][0]) for ranks in ordered)
        if any(differ(one.call, other.call) for one, other in combinations(ordered_parties, 2)):
            return Parting(group.facts, seq, ordered_parties)
    return None


def find_difference(
    group: GroupCalls, ranks: Mapping[int, RankCalls], *, all_ended: bool
) -> Difference | None:
    """Return the first collective that ranks of ``group`` issued differently, or None.

    Only positions for which the records of all these ranks were read are compared.

    Args:
        group: The collectives of the group.
        ranks: The calls of each rank, by rank.
        all_ended: Whether every rank has ended normally. If not, a rank may have stopped earlier than other ranks.
    """
    members = [rank for rank in group.members if ranks[rank].whole or group.by_seq.get(rank)]
    begin = max((min(group.by_seq[rank]) for rank in members if not ranks[rank].whole), default=0)
    sequences = {
        rank: [call for call in _issued_calls(group, rank) if call.number >= begin] for rank in members
    }
    if len(sequences) < 2:
        return None
    return first_difference(
        group.facts.pg,
        format_ranks(group.facts.ranks),
        sequences,
        ended=members if all_ended else (),
        gaps=True,
    )


def find_unequal_split(group: GroupCalls) -> Difference | None:
    """Return the first all_to_all of ``group`` in which a rank does not send the size that the receiver expects."""
    calls: dict[int, dict[int, IssuedCall]] = {}
    for rank, of_rank in group.by_seq.items():
        for number, (call, _) in of_rank.items():
            if call.what.op == Op.ALL_TO_ALL:
                calls.setdefault(number, {})[rank] = _issued_call(call)
    return first_unequal_split(group.facts.pg, format_ranks(group.facts.ranks), calls)


def find_order_differences(
    ranks: Sequence[RankCalls], groups: Sequence[GroupCalls], apart: Collection[Difference]
) -> list[OrderDifference]:
    """Return the first two collectives in different groups that ranks issued in different orders.

    There is at most one result for each set of groups that ranks share.

    Args:
        ranks: The calls of the ranks.
        groups: The collectives of the groups.
        apart: The differences within groups. Their groups are left out. Groups whose name was reused are left out, too.
    """
    left_out = {each.pg for each in apart}
    names = {group.facts.pg: (group.facts.pg, format_ranks(group.facts.ranks)) for group in groups}
    members = {names[group.facts.pg]: frozenset(group.members) for group in groups}
    shared = {pg for of_ranks in shared_groups(members) for pg, _ in of_ranks}
    courses = {rank.rank: Course() for rank in ranks}
    for rank in ranks:
        seen = set()
        for call in rank.calls:
            pg = call.what.pg
            if pg not in shared or call.what.is_p2p or call.raised:
                continue
            if (pg, call.pg_seq) in seen:
                left_out.add(pg)
            seen.add((pg, call.pg_seq))
            courses[rank.rank].add(GroupCall(names[pg], call.thread, _issued_call(call)))
    comparable = {name: of_group for name, of_group in members.items() if name[0] not in left_out}
    return order_differences(courses, comparable, has_all_records=True)


def _issued_calls(group: GroupCalls, rank: int) -> list[IssuedCall]:
    """Return the collectives that ``rank`` issued in ``group``, in order."""
    return [_issued_call(call) for _, (call, _) in sorted(group.by_seq.get(rank, {}).items())]


def _issued_call(call: Call) -> IssuedCall:
    what = call.what
    return IssuedCall(
        call.pg_seq,
        what.op,
        what.payload_bytes,
        what.dtype,
        what.reduce_op,
        what.peer,
        what.backend,
        step=call.step,
        module=call.module,
        purpose=call.purpose,
        call_site=call.site,
        input_bytes=what.input_bytes,
        output_bytes=what.output_bytes,
        input_splits=what.input_splits,
        output_splits=what.output_splits,
    )


def culprits(waits: Sequence[Wait]) -> tuple[int, ...]:
    """Return the ranks that other ranks wait for and that wait for no rank themselves."""
    waiting = {rank for wait in waits for rank in wait.waiting}
    return tuple(sorted({rank for wait in waits for rank in wait.missing} - waiting))


def find_cycle(waits: Sequence[Wait]) -> list[Wait]:
    """Return waits that form a ring, or an empty list if there is no ring."""
    by_rank = {rank: wait for wait in waits for rank in wait.waiting if wait.missing}
    for start in by_rank:
        seen: list[int] = []
        rank = start
        while rank in by_rank and rank not in seen:
            seen.append(rank)
            rank = next((r for r in by_rank[rank].missing if r in by_rank), -1)
        if rank in seen:
            ring = seen[seen.index(rank) :]
            cycle: list[Wait] = []
            for member in ring:
                if by_rank[member] not in cycle:
                    cycle.append(by_rank[member])
            return cycle
    return []
