"""Compare the order in which ranks issue the collectives of several groups that they share.

Two ranks that issue collectives of two groups in different orders can deadlock, although the collectives
within each group agree. The functions are pure and use only the standard library.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from commprof.align.ranks.agreement import IssuedCall, call_text, ranks_text, reference_of, when_text

Group: TypeAlias = tuple[str, str]  # name and ranks
Key = TypeVar("Key")
_Numbers: TypeAlias = tuple[int, ...]
_MOST_LISTED: Final = 10  # the most groups of a rank for which subsets are listed: about a thousand subsets


class GroupCall(NamedTuple):
    """A collective of a group, as one call in the course of a rank.

    Attributes:
        life: The number of earlier groups with this name.
    """

    group: Group
    thread: str | None
    call: IssuedCall
    life: int = 0

    @property
    def key(self) -> tuple[Group, int, int]:
        """The values that are equal in the records of all ranks."""
        return self.group, self.life, self.call.number

    @property
    def text(self) -> str:
        """A text such as ``all_reduce #5 (400 bytes, float32, SUM) at train.py:8 step in group 1 (0-3)``."""
        return f"{call_text(self.call)} in group {self.group[0]} ({self.group[1]})"

    @property
    def short_text(self) -> str:
        """A text such as ``all_reduce #5 of group 1 (0-3)``."""
        return f"{self.call.op} #{self.call.number} of group {self.group[0]} ({self.group[1]})"

    def as_dict(self) -> dict[str, Any]:
        """Return the call under the names of the schema's columns."""
        return {
            "pg": self.group[0],
            "group_ranks": self.group[1],
            "thread": self.thread,
            **self.call.as_dict(),
        }


@dataclass(slots=True)
class Course:
    """The calls that one rank issued in some groups.

    Attributes:
        calls: The calls in the order of issue.
        last: The life and number of the last collective of each group. A group without collectives has no
            entry.
        threads: By group, the threads that issued calls in the group.
    """

    calls: list[GroupCall] = field(default_factory=list)
    last: dict[Group, tuple[int, int]] = field(default_factory=dict)
    threads: dict[Group, set[str | None]] = field(default_factory=dict)

    def add(self, call: GroupCall) -> None:
        """Append the next call."""
        self.calls.append(call)
        place = call.life, call.call.number
        self.last[call.group] = max(place, self.last.get(call.group, place))
        self.threads.setdefault(call.group, set()).add(call.thread)

    def within(self, groups: Collection[Group]) -> Course:
        """Return the course with only the calls in ``groups``."""
        return Course([call for call in self.calls if call.group in groups], self.last, self.threads)


class Order(NamedTuple):
    """Ranks that issued ``first`` before ``second``, or that had not issued ``second`` at the end of their records."""

    ranks: tuple[int, ...]
    first: GroupCall
    second: GroupCall
    is_second_issued: bool

    @property
    def text(self) -> str:
        """A clause: ``rank 0 issued all_reduce #5 (...) in group 1 (0-3), then broadcast #2 (...) in group 2``."""
        who = f"{ranks_text(self.ranks)} issued {self.first.text}"
        if self.is_second_issued:
            return f"{who}, then {self.second.text}"
        return f"{who}, and not yet {self.second.short_text}"


class OrderDifference(NamedTuple):
    """Two collectives of two groups that some ranks issued in one order and other ranks in the other order."""

    orders: tuple[Order, Order]

    @property
    def sentence(self) -> str:
        """The difference as a clause."""
        one, other = self.orders
        return (
            f"{ranks_text(one.ranks)} and {ranks_text(other.ranks)} issued collectives of two groups in different orders "
            f"{when_text(one.first.call)}, which can deadlock: {one.text}; {other.text}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        return {
            "step": self.orders[0].first.call.step,
            "orders": [
                {
                    "ranks": list(order.ranks),
                    "first": order.first.as_dict(),
                    "second": order.second.as_dict(),
                    "is_second_issued": order.is_second_issued,
                }
                for order in self.orders
            ],
            "sentence": self.sentence,
        }


def shared_groups(members: Mapping[Key, Set[int]]) -> dict[frozenset[Key], frozenset[int]]:
    """Return the sets of at least two groups that any two ranks share, with the ranks of each set.

    The ranks of a set are all ranks that are in every group of the set.
    """
    same: dict[frozenset[int], list[Key]] = defaultdict(list)  # groups with the same ranks count as one
    for group, ranks in members.items():
        same[frozenset(ranks)].append(group)
    groups = list(same.values())
    of_rank: dict[int, list[int]] = defaultdict(list)
    for number, ranks in enumerate(same):
        for rank in ranks:
            of_rank[rank].append(number)
    alike: dict[_Numbers, list[int]] = defaultdict(list)  # the ranks that are in the same groups
    for rank, mine in of_rank.items():
        alike[tuple(mine)].append(rank)
    ranks_of: dict[_Numbers, list[int]] = {
        shared: [] for shared in _shared_numbers(alike) if sum(len(groups[number]) for number in shared) > 1
    }
    if max(map(len, alike), default=0) <= _MOST_LISTED:
        for numbers, mine in alike.items():
            for subset in _subsets(numbers):
                if subset in ranks_of:
                    ranks_of[subset] += mine
    else:
        for shared in ranks_of:
            for numbers, mine in alike.items():
                ranks_of[shared] += mine if {*shared} <= {*numbers} else []
    return {
        frozenset(group for number in shared for group in groups[number]): frozenset(ranks)
        for shared, ranks in ranks_of.items()
    }


def _shared_numbers(alike: Mapping[_Numbers, Sequence[int]]) -> set[_Numbers]:
    """Return the groups that any two ranks share, in time linear in the number of ranks.

    The function counts how many memberships contain each subset of a membership. The number of memberships
    that share exactly this subset follows by inclusion and exclusion. A rank that is in many groups has too
    many subsets, and then pairs of memberships are compared instead.

    Args:
        alike: The ranks of each membership. A membership is a set of groups to which a rank belongs.
    """
    shared = {numbers for numbers, ranks in alike.items() if len(ranks) > 1}
    if max(map(len, alike), default=0) > _MOST_LISTED:
        return shared | {tuple(sorted({*one} & {*other})) for one, other in combinations(alike, 2)}
    holding = Counter(subset for numbers in alike for subset in _subsets(numbers))
    for numbers in alike:
        subsets = _subsets(numbers)
        exact = [holding[subset] for subset in subsets]
        for bit in range(len(numbers)):
            for place in range(len(exact)):
                if not place >> bit & 1:
                    exact[place] -= exact[place | 1 << bit]
        exact[-1] -= 1  # the membership itself does not count
        shared.update(subset for subset, count in zip(subsets, exact, strict=True) if count > 0)
    return shared


def _subsets(numbers: _Numbers) -> list[_Numbers]:
    """Return all subsets of ``numbers``. The bits of the position of a subset show which numbers it contains."""
    subsets: list[_Numbers] = [()]
    for number in numbers:
        subsets += [(*subset, number) for subset in subsets]
    return subsets


def order_differences(
    courses: Mapping[int, Course], members: Mapping[Group, Set[int]], *, has_all_records: bool
) -> list[OrderDifference]:
    """Return for each set of shared groups the first two collectives that ranks issued in different orders.

    Only calls that the same thread of a rank issued are compared, because the order of two threads is random.

    Args:
        courses: The course of each rank.
        members: The compared ranks of each group.
        has_all_records: Whether no record is missing before the end of a course.
    """
    differences = []
    for groups, ranks in shared_groups(members).items():
        chosen = {rank: courses[rank].within(groups) for rank in sorted(ranks)}
        difference = first_order_difference(chosen, has_all_records=has_all_records)
        differences += [] if difference is None else [difference]
    return distinct_differences(differences)


def distinct_differences(differences: Iterable[OrderDifference]) -> list[OrderDifference]:
    """Return the differences without duplicates, in order of step.

    Among duplicates, the difference with the most ranks is returned.
    """
    by_keys: dict[frozenset[Any], OrderDifference] = {}
    for each in differences:
        keys = frozenset({each.orders[0].first.key, each.orders[0].second.key})
        by_keys[keys] = max(
            by_keys.get(keys, each), each, key=lambda one: sum(len(order.ranks) for order in one.orders)
        )
    return sorted(by_keys.values(), key=lambda each: (each.orders[0].first.call.step, each.sentence))


def first_order_difference(
    courses: Mapping[int, Course], *, has_all_records: bool, reference: int | None = None
) -> OrderDifference | None:
    """Return the first two collectives that ranks issued in different orders, or None if there are none.

    Args:
        courses: The course of each rank. All courses are in the same groups.
        has_all_records: See :func:`order_differences`.
        reference: The rank with which the others are compared. Default: a rank of the largest set that issued
            the same.
    """
    keys = {rank: [call.key for call in course.calls] for rank, course in courses.items()}
    if reference is None:
        reference = reference_of(keys)
    swaps = [
        swap
        for rank, course in courses.items()
        if keys[rank] != keys[reference]
        and (swap := _first_swap(courses[reference], course, has_all_records=has_all_records)) is not None
    ]
    if not swaps:
        return None
    _, first, second = min(swaps, key=lambda swap: swap[0])
    orders = _order(courses, first, second), _order(courses, second, first)
    one, other = sorted(orders, key=lambda order: (-len(order.ranks), order.ranks))
    return OrderDifference((one, other))


def _first_swap(
    mine: Course, theirs: Course, *, has_all_records: bool
) -> tuple[int, GroupCall, GroupCall] | None:
    """Return the position in ``mine`` at which the orders differ, and the calls of ``mine`` and ``theirs`` there."""
    threads = {call.key: call.thread for call in theirs.calls}
    position = {call.key: place for place, call in enumerate(mine.calls)}
    ours: dict[Any, list[GroupCall]] = defaultdict(list)
    others: dict[Any, list[GroupCall]] = defaultdict(list)
    for call in mine.calls:
        if call.key in threads:
            ours[call.thread, threads[call.key]].append(call)
    for call in theirs.calls:
        if call.key in position:
            others[mine.calls[position[call.key]].thread, call.thread].append(call)
    swaps = [
        (position[one.key], one, other)
        for pair, calls in ours.items()
        for one, other in _first_difference(calls, others[pair])
    ]
    if swaps:
        return min(swaps, key=lambda swap: swap[0])
    return _first_unissued(mine, theirs) if has_all_records else None


def _first_difference(
    mine: Iterable[GroupCall], theirs: Iterable[GroupCall]
) -> Iterable[tuple[GroupCall, GroupCall]]:
    for one, other in zip(mine, theirs, strict=True):
        if one.key != other.key:
            return [(one, other)] if one.group != other.group else []
    return []


def _first_unissued(mine: Course, theirs: Course) -> tuple[int, GroupCall, GroupCall] | None:
    """Return where each course has a collective that the other had not reached.

    In this case, neither rank can have the order of the other.
    """
    here = next(((place, call) for place, call in enumerate(mine.calls) if _is_ahead(call, theirs)), None)
    there = next((call for call in theirs.calls if _is_ahead(call, mine)), None)
    if here is None or there is None:
        return None
    place, call = here
    thread = {call.thread}
    is_one_thread = there.thread == call.thread and all(
        course.threads.get(group, thread) <= thread
        for course, group in ((mine, there.group), (theirs, call.group))
    )
    return (place, call, there) if is_one_thread else None


def _is_ahead(call: GroupCall, course: Course) -> bool:
    return (call.life, call.call.number) > course.last.get(call.group, (-1, -1))


def _order(courses: Mapping[int, Course], first: GroupCall, second: GroupCall) -> Order:
    """Return the ranks that issued ``first`` before ``second``.

    If no rank issued both in this order, the ranks that had issued ``first`` but not reached ``second`` are
    returned.
    """
    both: dict[int, tuple[GroupCall, GroupCall]] = {}
    only: dict[int, GroupCall] = {}
    for rank, course in sorted(courses.items()):
        mine = {call.key: (place, call) for place, call in enumerate(course.calls)}
        one, other = mine.get(first.key), mine.get(second.key)
        if one is None:
            continue
        if other is None:
            if _is_ahead(second, course):
                only[rank] = one[1]
        elif one[0] < other[0] and one[1].thread == other[1].thread:
            both[rank] = one[1], other[1]
    if both:
        return Order(tuple(both), *next(iter(both.values())), True)
    return Order(tuple(only), next(iter(only.values())), second, False)
