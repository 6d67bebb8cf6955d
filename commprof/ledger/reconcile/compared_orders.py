"""Finds ranks that issued the collectives of several groups in different orders.

One pass over all records sums hashes of successive collectives of each rank. Equal orders give equal sums. Only the
records of groups whose sums differ are read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commprof.align.ranks.agreement import Difference, IssuedCall, call_of, reference_of
from commprof.align.ranks.collectives import in_order
from commprof.align.ranks.group_orders import (
    Course,
    GroupCall,
    OrderDifference,
    distinct_differences,
    first_order_difference,
    shared_groups,
)
from commprof.ledger.records.precount import GROUP, Group
from commprof.ledger.records.row_index import Flags, Numbers, combinations
from commprof.ledger.requests.request import RecordedRun, recorded_ranks
from commprof.schema import Op, Status, parse_ranks

_STATE: Final = ("op", "captured", "status")
_RECORD: Final = ("attempt", "rank", "pid", "seq")
_NUMBERS: Final = ("pid", "seq", "pg_seq")
COLUMNS: Final = (*GROUP, *_STATE, "rank", "pid", "thread", "step", "pg_seq")
_ORDER: Final = (*COLUMNS, "seq")
_SHOWN: Final = (
    *_ORDER,
    "payload_bytes",
    "dtype",
    "reduce_op",
    "peer",
    "backend",
    "after_step",
    "module",
    "purpose",
    "call_site",
    "input_bytes",
    "output_bytes",
    "input_splits",
    "output_splits",
)
_WEIGHTS: Final = tuple(
    np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# The bits that are cut off a hash, so that the sum of up to 2 ** 23 hashes is exact.
_CUT_BITS: Final = np.uint64(24)

Sums: TypeAlias = npt.NDArray[np.uint64]
_Rank: TypeAlias = tuple[int, int]  # attempt and rank
_Key: TypeAlias = tuple[int, int, int, int]  # attempt, rank, pid and seq of a record
# A position in the sequence of a rank, the slot of this rank at the position, and the slot of the other rank.
_Swap: TypeAlias = tuple[int, int, int]


class _Shared(NamedTuple):
    """A set of groups (by number) that several ranks share, and the ranks that are in all these groups."""

    groups: frozenset[int]
    ranks: frozenset[int]


class _Rows(NamedTuple):
    """The collectives of one rank in some groups, in the order of issue, in arrays of equal length.

    ``slot`` is equal in the records of one collective on all ranks, and increases with the number in the group.
    """

    slot: Numbers
    group: Numbers
    thread: Numbers
    pid: Numbers
    seq: Numbers

    def of(self, is_mine: Flags) -> _Rows:
        """Return the rows of the groups for which ``is_mine`` is true."""
        chosen = is_mine[self.group]
        return self if chosen.all() else _Rows(*(column[chosen] for column in self))


class _Slots(NamedTuple):
    """The group and the life of each slot.

    A group name can be used repeatedly. ``life`` is the number of earlier groups with the same name. ``begins`` has the
    first slot of each life of each group.
    """

    begins: Numbers
    group: Numbers
    life: Numbers

    def of(self, slot: int) -> tuple[int, int, int]:
        """Return the group, the life and the number in the group of ``slot``."""
        place = int(np.searchsorted(self.begins, slot, side="right")) - 1
        return int(self.group[place]), int(self.life[place]), slot - int(self.begins[place])


class GroupOrders:
    """The order in which each rank issued the collectives of the groups that it shares, as sums of hashes.

    Records are added in parts.

    Args:
        run: The run whose records will be added. The records of a process must be added in the order of issue.
    """

    def __init__(self, run: RecordedRun) -> None:
        recorded = recorded_ranks(run)
        self._groups: dict[Group, int] = {}
        self._shared: list[_Shared] = []
        self._of_rank: dict[_Rank, list[int]] = defaultdict(list)  # positions in _shared
        members: dict[int, dict[int, frozenset[int]]] = defaultdict(dict)
        for group, _ in combinations(run.table("groups"), GROUP):
            attempt, _, ranks = group
            number = self._groups.setdefault(group, len(self._groups))
            members[attempt][number] = frozenset(parse_ranks(ranks)) & recorded[attempt]
        for attempt, of_attempt in members.items():
            for groups, of_groups in shared_groups(of_attempt).items():
                for rank in of_groups:
                    self._of_rank[attempt, rank].append(len(self._shared))
                self._shared.append(_Shared(groups, of_groups))
        self._is_shared = [self._is_in(groups) for groups, _ in self._shared]
        self._streams: dict[tuple[int, str | None], int] = {}  # set of shared groups and thread -> number
        # The hash of the last collective of each process in each stream.
        self._last: dict[tuple[int, _Rank, int], np.uint64] = {}
        self._sums: list[tuple[Numbers, ...]] = []

    def add(self, part: pa.Table) -> None:
        """Add the records in ``part``, with the columns :data:`COLUMNS`."""
        if not self._shared or not len(part):
            return
        group = self._groups_of(part)
        event = part["pg_seq"].to_numpy().astype(np.uint64) * _WEIGHTS[0]
        event = _mixed(event + group.astype(np.uint64) * _WEIGHTS[1])
        steps = part["step"].to_numpy().astype(np.int64)
        for (attempt, rank, pid, thread), places in combinations(part, ["attempt", "rank", "pid", "thread"]):
            for number in self._of_rank.get((attempt, rank), ()):
                stream = self._streams.setdefault((number, thread), len(self._streams))
                mine = places[self._is_shared[number][group[places]]]
                if len(mine):
                    self._take_in(stream, (attempt, rank), pid, event[mine], steps[mine])

    def differences(
        self, run: RecordedRun, differences: Collection[Difference], *, has_all_records: bool
    ) -> list[OrderDifference]:
        """Return, for each set of groups that ranks share, the first two collectives issued in different orders.

        Args:
            run: The run whose records were added.
            differences: Differences within groups. These groups are left out, because their numbers do not show which
                calls belong together.
            has_all_records: Whether no record is missing.
        """
        left_out = {(each.pg, each.group_ranks) for each in differences}
        comparable = {number for (_, *group), number in self._groups.items() if tuple(group) not in left_out}
        chosen = {
            each: groups
            for each in self._suspects()
            if len(groups := self._shared[each].groups & comparable) > 1
        }
        if not chosen:
            return []
        threads: dict[str | None, int] = {}
        rows, slots = self._rows(run, frozenset().union(*chosen.values()), threads)
        windows = []
        for each, groups in chosen.items():
            is_mine = self._is_in(groups)
            of_ranks = {
                rank: mine.of(is_mine) for rank, mine in rows.items() if each in self._of_rank.get(rank, ())
            }
            windows.append((of_ranks, *_differing_slots(of_ranks, has_all_records=has_all_records)))
        calls = _calls(run, {key for of_ranks, _, apart in windows for key in _keys(of_ranks, apart)})
        names = list(threads)
        first_differences = (
            first_order_difference(
                self._courses(of_ranks, apart, slots, names, calls),
                has_all_records=has_all_records,
                reference=reference,
            )
            for of_ranks, reference, apart in windows
        )
        return distinct_differences(each for each in first_differences if each is not None)

    def _groups_of(self, part: pa.Table) -> Numbers:
        """Return the number of the group of each row, or -1 if the row is not a collective that ran."""
        group_numbers = np.full(len(part), -1, np.int64)
        for (*group, op, captured, status), places in combinations(part, [*GROUP, *_STATE]):
            if op not in (Op.SEND, Op.RECV) and not captured and status != Status.RAISED:
                group_numbers[places] = self._groups.get(tuple(group), -1)
        return group_numbers

    def _is_in(self, groups: Iterable[int]) -> Flags:
        """Return for each group number whether it is in ``groups``. The last element is for the number -1."""
        is_chosen = np.zeros(len(self._groups) + 1, bool)
        is_chosen[list(groups)] = True
        return is_chosen

    def _take_in(self, stream: int, rank: _Rank, pid: int, event: Sums, steps: Numbers) -> None:
        """Sum by step the hashes of all pairs of successive collectives of a process in a stream."""
        before = np.empty_like(event)
        before[0], before[1:] = self._last.get((stream, rank, pid), np.uint64(0)), event[:-1]
        self._last[stream, rank, pid] = event[-1]
        mixed = _mixed(before * _WEIGHTS[2] + event) >> _CUT_BITS
        starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
        totals = np.add.reduceat(mixed, starts).astype(np.int64)
        self._sums.append(
            (np.full(len(starts), stream), np.full(len(starts), rank[1]), steps[starts], totals)
        )

    def _suspects(self) -> list[int]:
        """Return the positions of the sets of shared groups whose ranks have different sums in some step."""
        if not self._sums:
            return []
        columns = map(np.concatenate, zip(*self._sums, strict=True))
        table = pa.table(dict(zip(("stream", "rank", "step", "total"), columns, strict=True)))
        of_rank = table.group_by(["stream", "step", "rank"]).aggregate([("total", "sum")])
        ends = of_rank.group_by(["stream", "step"]).aggregate(
            [([], "count_all"), ("total_sum", "min"), ("total_sum", "max")]
        )
        stream, present, low, high = (
            ends[name].to_numpy() for name in ("stream", "count_all", "total_sum_min", "total_sum_max")
        )
        shared = np.array([position for position, _ in self._streams], np.int64)[stream]
        expected = np.array([len(each.ranks) for each in self._shared], np.int64)[shared]
        return [int(position) for position in np.unique(shared[(present != expected) | (low != high)])]

    def _rows(
        self, run: RecordedRun, groups: frozenset[int], threads: dict[str | None, int]
    ) -> tuple[dict[_Rank, _Rows], _Slots]:
        """Return the collectives of ``groups`` by rank. The numbers of the threads are added to ``threads``."""
        wanted = self._is_in(groups)
        columns_of_rank: dict[_Rank, list[list[Numbers]]] = defaultdict(list)
        for part in run.parts("collectives", _ORDER):
            group = self._groups_of(part)
            thread = np.zeros(len(part), np.int32)
            for (name,), places in combinations(part, ["thread"]):
                thread[places] = threads.setdefault(name, len(threads))
            columns = [group.astype(np.int32), thread, *(part[name].to_numpy() for name in _NUMBERS)]
            for (attempt, rank), places in combinations(part, ["attempt", "rank"]):
                mine = places[wanted[group[places]]]
                columns_of_rank[attempt, rank].append([column[mine] for column in columns])
        ranks = list(columns_of_rank)
        of_ranks = [list(map(np.concatenate, zip(*columns_of_rank.pop(rank), strict=True))) for rank in ranks]
        bounds = np.cumsum([0, *(len(columns[0]) for columns in of_ranks)])
        columns = list(map(np.concatenate, zip(*of_ranks, strict=True)))
        del of_ranks
        group, thread, pid, seq, number = columns
        slot, slots = _slots_of(np.repeat(np.arange(len(ranks)), np.diff(bounds)), group, number)
        rows = {}
        for place, rank in enumerate(ranks):
            begin, end = bounds[place : place + 2].tolist()
            rows[rank] = _Rows(*(column[begin:end] for column in (slot, group, thread, pid, seq)))
        return rows, slots

    def _courses(
        self,
        rows: Mapping[_Rank, _Rows],
        chosen: Numbers,
        slots: _Slots,
        threads: list[str | None],
        calls: Mapping[_Key, IssuedCall],
    ) -> dict[int, Course]:
        """Return the calls of each rank in the slots ``chosen``, and its last call in each group."""
        names = [(pg, ranks) for _, pg, ranks in self._groups]
        courses = {}
        for rank, mine in rows.items():
            course = courses[rank[1]] = Course()
            for key, place in _keys({rank: mine}, chosen).items():
                group, life, _ = slots.of(int(mine.slot[place]))
                course.calls.append(GroupCall(names[group], threads[mine.thread[place]], calls[key], life))
            for group in np.flatnonzero(np.bincount(mine.group)).tolist():
                is_mine = mine.group == group
                course.last[names[group]] = slots.of(int(mine.slot[is_mine].max()))[1:]
                thread_codes = np.flatnonzero(np.bincount(mine.thread[is_mine]))
                course.threads[names[group]] = {threads[code] for code in thread_codes}
        return courses


def _slots_of(owner: Numbers, group: Numbers, number: Numbers) -> tuple[Numbers, _Slots]:
    """Return the slot of each row, which encodes its group, the life of the group, and its number in the group."""
    order, starts = in_order((owner, group, number))
    life = np.zeros(len(order), np.int64)
    if len(starts) < len(order):  # A rank used a number twice, so a group name was used again.
        lengths = np.diff(np.append(starts, len(order)))
        life[order] = np.arange(len(order)) - np.repeat(starts, lengths)
    del order
    lives = int(life.max(initial=0)) + 1
    # The number of slots that each life of each group needs.
    room = np.zeros((int(group.max(initial=0)) + 1) * lives, np.int64)
    which = group.astype(np.int64) * lives + life
    np.maximum.at(room, which, number + 1)
    begins = np.cumsum(room) - room
    used = np.flatnonzero(room)
    return begins[which] + number, _Slots(begins[used], *np.divmod(used, lives))


def _mixed(numbers: Sums) -> Sums:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _WEIGHTS[1]
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _WEIGHTS[2]
    return numbers ^ (numbers >> np.uint64(31))


def _differing_slots(of_ranks: Mapping[_Rank, _Rows], *, has_all_records: bool) -> tuple[int, Numbers]:
    """Return the reference rank, and the slots at which each other rank first differs from the reference rank."""
    reference = reference_of({rank: [rows.slot.tobytes()] for (_, rank), rows in of_ranks.items()})
    (mine,) = (rows for (_, rank), rows in of_ranks.items() if rank == reference)
    slots: list[int] = []
    for (_, rank), theirs in of_ranks.items():
        if rank != reference:
            swap = min(_swaps(mine, theirs), default=None) or (
                _unissued(mine, theirs) if has_all_records else None
            )
            slots += swap[1:] if swap is not None else ()
    return reference, np.array(slots, np.int64)


def _swaps(mine: _Rows, theirs: _Rows) -> Iterator[_Swap]:
    """Yield the first swap of two collectives between the ranks, for each pair of their threads."""
    places = np.full(max(mine.slot.max(initial=-1), theirs.slot.max(initial=-1)) + 1, -1)
    places[mine.slot] = np.arange(len(mine.slot))
    # The positions in ``mine`` of the collectives of both ranks, in the order of ``theirs``.
    order = places[theirs.slot]
    is_common = order >= 0
    order = order[is_common]
    pairs = mine.thread[order] * (int(theirs.thread.max(initial=0)) + 1) + theirs.thread[is_common]
    for pair in np.flatnonzero(np.bincount(pairs)):
        of_pair = order[pairs == pair]
        if (of_pair[1:] > of_pair[:-1]).all():
            continue
        expected = np.sort(of_pair)
        at = int(np.flatnonzero(expected != of_pair)[0])
        if mine.group[expected[at]] != mine.group[of_pair[at]]:
            yield int(expected[at]), int(mine.slot[expected[at]]), int(mine.slot[of_pair[at]])


def _unissued(mine: _Rows, theirs: _Rows) -> _Swap | None:
    """Return the first collective of each rank that the other rank did not reach, as a swap."""
    ahead, behind = (np.flatnonzero(_is_ahead(*pair)) for pair in ((mine, theirs), (theirs, mine)))
    if not len(ahead) or not len(behind):
        return None
    return int(ahead[0]), int(mine.slot[ahead[0]]), int(theirs.slot[behind[0]])


def _is_ahead(rows: _Rows, others: _Rows) -> Flags:
    last = np.full(max(rows.group.max(initial=0), others.group.max(initial=0)) + 1, -1)
    np.maximum.at(last, others.group, others.slot)
    ahead: Flags = rows.slot > last[rows.group]
    return ahead


def _keys(of_ranks: Mapping[_Rank, _Rows], slots: Numbers) -> dict[_Key, int]:
    """Return the keys of the records in ``slots``, with the index of each record among the rows of its rank."""
    return {
        (attempt, rank, int(rows.pid[place]), int(rows.seq[place])): int(place)
        for (attempt, rank), rows in of_ranks.items()
        for place in np.flatnonzero(np.isin(rows.slot, slots))
    }


def _calls(run: RecordedRun, wanted: Collection[_Key]) -> dict[_Key, IssuedCall]:
    """Return the calls of the records ``wanted``."""
    if not wanted:
        return {}
    numbers = np.array(sorted({seq for *_, seq in wanted}), np.int64)
    calls = {}
    for part in run.parts("collectives", _SHOWN):
        for row in part.filter(pa.array(np.isin(part["seq"].to_numpy(), numbers))).to_pylist():
            key = row["attempt"], row["rank"], row["pid"], row["seq"]
            if key in wanted:
                calls[key] = call_of(row, row["pg_seq"])
    return calls
