"""Compares the collectives that the ranks of each group issued, and finds the first one that differs.

One pass over all records sums hashes. Ranks that issued the same collectives in a step have equal sums. Only the
records of groups whose sums differ are read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.agreement import (
    Agreed,
    Difference,
    IssuedCall,
    agreed,
    call_of,
    conflict,
    difference_from,
)
from commprof.align.ranks.collectives import in_order, repetitions
from commprof.align.sequences.group_ids import numbered
from commprof.ledger.records.precount import GROUP, Group
from commprof.ledger.records.row_index import Numbers, combinations
from commprof.ledger.requests.request import RecordedRun, last_attempt, recorded_ranks
from commprof.schema import Op, Status, parse_ranks

_KIND: Final = (*GROUP, "op", "payload_bytes", "dtype", "reduce_op", "peer", "backend", "captured", "status")
COLUMNS: Final = (*_KIND, "rank", "step", "pg_seq")
_NUMBERS: Final = ("rank", "pid", "seq", "pg_seq", "issue_ns", "step")
_ORDER: Final = (*COLUMNS, "pid", "seq", "issue_ns", "module", "call_site")
_SHOWN: Final = (
    *_ORDER,
    "after_step",
    "purpose",
    "input_bytes",
    "output_bytes",
    "input_splits",
    "output_splits",
)
_OF_STEP: Final = ["group", "step"]
_SUMS: Final = [*_OF_STEP, "rank", "count", "mixed"]
_BITS: Final = np.uint64(26)
# If the values of a part have a larger range than this, only the values that occur are numbered.
_SPARSE: Final = 1 << 16
_STEP_BITS: Final = 32
_MIX: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))
_BEFORE, _BEHIND = 16, 176  # number of collectives before and after a difference that are compared in detail


class _Compact(NamedTuple):
    """An array of integers, encoded as indices (``codes``) into sorted ``values``. Some values may not occur."""

    values: Numbers
    codes: Numbers


def _compact(numbers: Numbers) -> _Compact:
    low, high = int(numbers.min()), int(numbers.max())
    if high - low < _SPARSE:
        return _Compact(np.arange(low, high + 1), numbers.astype(np.int64) - low)
    return _Compact(*np.unique(numbers, return_inverse=True))


class _Kinds(NamedTuple):
    """The group of each row (-1 if the row does not count), and a number for the values that ranks must agree on."""

    group: Numbers
    agreed: Numbers


@dataclass(slots=True)
class _Rows:
    """The collectives of one group, in arrays of equal length.

    ``place`` is the position among the collectives of the group. ``life`` is the number of earlier groups with the same
    name. ``label`` is equal for calls of one step from one place in the program.
    """

    rank: Numbers
    pid: Numbers
    seq: Numbers
    place: Numbers
    life: Numbers
    agreed: Numbers
    label: Numbers
    step: Numbers


class _Window(NamedTuple):
    """The position at which the ranks of a group differ, and the records around this position, by rank."""

    place: int
    rows: Mapping[int, Mapping[tuple[int, int], int]]  # rank -> pid and seq -> place


@dataclass(slots=True)
class RankOrders:
    """The collectives of each rank of each group in each step, as sums of hashes. Records are added in parts."""

    _groups: dict[Group, int] = field(default_factory=dict)
    _agreed: dict[Agreed, int] = field(default_factory=dict)
    _sums: list[pa.Table] = field(default_factory=list)

    def add(self, part: pa.Table) -> None:
        """Add the records in ``part``, with the columns :data:`COLUMNS`."""
        if not len(part):
            return
        kinds = self._kinds(part)
        number = part["pg_seq"].to_numpy().astype(np.uint64)
        mixed = (number * _MIX[0]) ^ (kinds.agreed.astype(np.uint64) * _MIX[1])
        mixed = ((mixed ^ (mixed >> np.uint64(29))) * _MIX[1]) >> (np.uint64(64) - _BITS)
        ranks, steps = (_compact(part[name].to_numpy()) for name in ("rank", "step"))
        key = ((kinds.group + 1) * len(ranks.values) + ranks.codes) * len(steps.values) + steps.codes
        count = np.bincount(key)
        # A sum of 26-bit numbers is exact in float64 for up to 2 ** 27 records.
        total = np.bincount(key, weights=mixed)
        present = np.flatnonzero(count)
        present = present[present >= len(ranks.values) * len(steps.values)]  # Lower keys belong to no group.
        rest, step = np.divmod(present, len(steps.values))
        group, rank = np.divmod(rest, len(ranks.values))
        columns = (
            group - 1,
            steps.values[step],
            ranks.values[rank],
            count[present],
            total[present].astype(np.int64),
        )
        self._sums.append(pa.table(list(map(pa.array, columns)), names=_SUMS))

    def differences(self, run: RecordedRun, *, has_all_records: bool, complete: bool) -> list[Difference]:
        """Return the first collective of each group that differs between its recorded ranks.

        Args:
            run: The run whose records were added.
            has_all_records: Whether no record is missing. Otherwise only calls with the same number are compared.
            complete: Whether every rank ended normally. Otherwise a rank may only have stopped earlier, as in every
                attempt before the last one.
        """
        members = self._members(run)
        counts = self._counts()
        suspects = [group for group in self._suspects(members, counts) if len(members[group]) > 1]
        if not suspects:
            return []
        windows, last = {}, last_attempt(run)
        attempts = [attempt for attempt, *_ in self._groups]
        for group, rows in self._rows_of(run, set(suspects)).items():
            uneven = _first_uneven_step(counts, group, members[group])
            ended = has_all_records and complete and attempts[group] == last
            window = self._window(
                rows, members[group], uneven, has_all_records=has_all_records, complete=ended
            )
            if window is not None:
                windows[group] = window
        return list(self._described(run, windows)) if windows else []

    def _kinds(self, part: pa.Table) -> _Kinds:
        chosen = part.select(list(_KIND))
        codes, first = numbered(chosen)
        groups, agreements = np.full(len(first), -1, np.int64), np.zeros(len(first), np.int64)
        for code, row in enumerate(chosen.take(pa.array(first)).to_pylist()):
            group = tuple(row[name] for name in GROUP)
            if row["op"] in (Op.SEND, Op.RECV) or row["captured"] or row["status"] == Status.RAISED:
                continue
            groups[code] = self._groups.setdefault(group, len(self._groups))
            shared = agreed(
                *(row[name] for name in ("op", "payload_bytes", "dtype", "reduce_op", "peer", "backend"))
            )
            agreements[code] = self._agreed.setdefault(shared, len(self._agreed))
        return _Kinds(groups[codes], agreements[codes])

    def _members(self, run: RecordedRun) -> list[frozenset[int]]:
        """Return the ranks of each group that have records."""
        recorded = recorded_ranks(run)
        return [frozenset(parse_ranks(ranks)) & recorded[attempt] for attempt, _, ranks in self._groups]

    def _counts(self) -> pa.Table:
        if not self._sums:
            return pa.table({name: pa.array([], pa.int64()) for name in _SUMS})
        sums = pa.concat_tables(self._sums).group_by([*_OF_STEP, "rank"])
        return sums.aggregate([("count", "sum"), ("mixed", "sum")]).rename_columns(_SUMS)

    def _suspects(self, members: list[frozenset[int]], counts: pa.Table) -> list[int]:
        """Return the groups whose ranks have different sums in some step."""
        if not len(counts):
            return []
        ends = counts.group_by(_OF_STEP).aggregate(
            [([], "count_all"), *((name, end) for name in ("count", "mixed") for end in ("min", "max"))]
        )
        group, present, *extremes = (
            ends[name].to_numpy()
            for name in ("group", "count_all", "count_min", "count_max", "mixed_min", "mixed_max")
        )
        expected = np.array([len(ranks) for ranks in members], np.int64)[group]
        apart = (present != expected) | (extremes[0] != extremes[1]) | (extremes[2] != extremes[3])
        return [int(number) for number in np.unique(group[apart])]

    def _rows_of(self, run: RecordedRun, groups: set[int]) -> dict[int, _Rows]:
        """Return the rows of each of ``groups``, in the order of the records."""
        labels: dict[tuple[Any, ...], int] = {}
        columns_of_group: dict[int, list[list[Numbers]]] = {group: [] for group in groups}
        for part in run.parts("collectives", _ORDER):
            kinds = self._kinds(part)
            columns = {name: part[name].to_numpy().astype(np.int64) for name in _NUMBERS}
            # The label combines a place in the program and a step. There are too many steps to iterate over them.
            label = columns["step"].copy()
            for key, places in combinations(part, ["module", "call_site"]):
                label[places] += labels.setdefault(key, len(labels)) << _STEP_BITS
            for group, of_group in columns_of_group.items():
                places = np.flatnonzero(kinds.group == group)
                of_group.append([column[places] for column in (*columns.values(), kinds.agreed, label)])
        return {
            group: _ordered(*map(np.concatenate, zip(*of_group, strict=True)))
            for group, of_group in sorted(columns_of_group.items())
        }

    def _window(
        self,
        rows: _Rows,
        members: frozenset[int],
        uneven: int | None,
        *,
        has_all_records: bool,
        complete: bool,
    ) -> _Window | None:
        """Return the first position at which the ranks differ and the records around it. None if they do not differ."""
        order, starts = in_order((rows.life, rows.place))
        sizes = np.diff(np.append(starts, len(order)))
        slot = np.empty(len(order), np.int64)
        slot[order] = np.repeat(np.arange(len(starts)), sizes)
        conflicts = [self._first_conflict(rows.agreed[order], starts, sizes)]
        if has_all_records:
            conflicts += [_first_missing(slot[rows.rank == rank], len(starts), complete) for rank in members]
        first = min((each for each in conflicts if each is not None), default=None)
        if first is None:
            return None
        begins = {first, _begin_of_shift(rows.label[order], starts, sizes, first)}
        if uneven is not None:
            begins.add(int(slot[rows.step == uneven].min()))
        begin = min(each for each in begins if each <= first)
        near = (slot >= begin - _BEFORE) & (slot < begin + _BEHIND)
        near |= (slot >= first - _BEFORE) & (slot < first + _BEFORE)
        near &= rows.life == rows.life[order[starts[first]]]
        chosen: dict[int, dict[tuple[int, int], int]] = {rank: {} for rank in members}
        for row in np.flatnonzero(near).tolist():
            chosen[int(rows.rank[row])][int(rows.pid[row]), int(rows.seq[row])] = int(rows.place[row])
        return _Window(int(rows.place[order[starts[first]]]), chosen)

    def _first_conflict(self, kinds: Numbers, starts: Numbers, sizes: Numbers) -> int | None:
        """Return the first slot in which the calls of the ranks cannot be the same collective."""
        known = list(self._agreed)
        pairs: dict[tuple[int, ...], bool] = {}
        differs = np.minimum.reduceat(kinds, starts) != np.maximum.reduceat(kinds, starts)
        for slot in np.flatnonzero(differs).tolist():
            kinds_of_slot = tuple(np.unique(kinds[starts[slot] : starts[slot] + sizes[slot]]).tolist())
            if kinds_of_slot not in pairs:
                pairs[kinds_of_slot] = any(
                    conflict(known[a], known[b]) for a in kinds_of_slot for b in kinds_of_slot
                )
            if pairs[kinds_of_slot]:
                return int(slot)
        return None

    def _described(self, run: RecordedRun, windows: Mapping[int, _Window]) -> Iterator[Difference]:
        sequences: dict[int, dict[int, list[IssuedCall]]] = {
            group: {rank: [] for rank in window.rows} for group, window in windows.items()
        }
        for part in run.parts("collectives", _SHOWN):
            for group, rank, places in self._of_windows(part, windows):
                chosen = windows[group].rows[rank]
                for row in part.take(pa.array(places)).to_pylist():
                    place = chosen.get((row["pid"], row["seq"]))
                    if place is not None:
                        sequences[group][rank].append(call_of(row, place))
        names = list(self._groups)
        for group, window in windows.items():
            of_ranks = {rank: sorted(calls) for rank, calls in sorted(sequences[group].items())}
            _, pg, ranks = names[group]
            yield difference_from(pg, ranks, of_ranks, window.place)

    def _of_windows(
        self, part: pa.Table, windows: Mapping[int, _Window]
    ) -> Iterable[tuple[int, int, Numbers]]:
        seq = part["seq"].to_numpy()
        for (*names, rank), places in combinations(part, [*GROUP, "rank"]):
            group = self._groups.get(tuple(names), -1)
            if group in windows and windows[group].rows.get(rank):
                of_rank = np.array([seq for _, seq in windows[group].rows[rank]], np.int64)
                yield group, rank, places[np.isin(seq[places], of_rank)]


def _ordered(
    rank: Numbers,
    pid: Numbers,
    seq: Numbers,
    number: Numbers,
    issue_ns: Numbers,
    step: Numbers,
    agreed: Numbers,
    label: Numbers,
) -> _Rows:
    life = repetitions((rank, number), pa.table({"issue_ns": issue_ns, "seq": seq}))
    return _Rows(rank, pid, seq, number, life, agreed, label, step)


def _first_uneven_step(counts: pa.Table, group: int, members: frozenset[int]) -> int | None:
    """Return the first step in which the ranks of ``group`` issued different numbers of collectives."""
    mine = counts.filter((pc.field("group") == group) & (pc.field("step") >= 0))
    ends = mine.group_by(["step"]).aggregate([([], "count_all"), ("count", "min"), ("count", "max")])
    step, present, least, most = (
        ends[name].to_numpy() for name in ("step", "count_all", "count_min", "count_max")
    )
    uneven = step[(present != len(members)) | (least != most)]
    return int(uneven.min()) if len(uneven) else None


def _first_missing(slots: Numbers, count: int, complete: bool) -> int | None:
    """Return the first of ``count`` slots that is not in ``slots``, the slots of a rank.

    A slot after the last slot of the rank counts only if the rank ended normally (``complete``).
    """
    slots = np.sort(slots)
    lacking = np.flatnonzero(slots != np.arange(len(slots)))
    if len(lacking):
        return int(lacking[0])
    return len(slots) if complete and len(slots) < count else None


def _begin_of_shift(labels: Numbers, starts: Numbers, sizes: Numbers, first: int) -> int:
    """Return the first of the consecutive slots before ``first`` in which the ranks called from different places."""
    differs = np.minimum.reduceat(labels, starts) != np.maximum.reduceat(labels, starts)
    alike = np.flatnonzero(~differs[:first])
    return int(alike[-1]) + 1 if len(alike) else 0
