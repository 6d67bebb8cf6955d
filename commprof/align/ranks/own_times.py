"""Own time: how long the program of a rank ran between two collectives of a group, without exposed communication. Pure.

A rank arrives late at a collective by its own time, or because earlier waits blocked it. The reference is the last
earlier collective of the same group that the program waited for and that makes every member wait for every other. A
rooted collective is a reference only for other rooted collectives, in a group that has no collectives of the other
kind. The time between the two issues is the sum of own time and of the recorded waits that blocked the program, in the
reference and elsewhere.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.cpp_waits import COLUMNS
from commprof.align.sequences.group_ids import numbered, split_by

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_NEVER: Final = 1 << 62  # later than any time
_UNKNOWN: Final = -(1 << 62)  # earlier than any
OWN_COLUMNS: Final = ("own_ns", "own_since_seq", "held_elsewhere_ns")
_ROOTED: Final = ("broadcast", "scatter", "reduce", "gather")
SOURCES: Final = (
    "op",
    "rank",
    "attempt",
    "pid",
    "pg",
    "group_ranks",
    "pg_seq",
    "is_p2p",
    "is_async",
    "device",
    "issue_ns",
    "return_ns",
    "wait_begin_ns",
    "wait_end_ns",
    "device_end_ns",
    "exposed_ns",
)


class OwnTimes(NamedTuple):
    """For each record: its own time, the number in the group of the reference, the time blocked elsewhere; where known."""

    own: Numbers
    since: Numbers
    elsewhere: Numbers
    is_known: Flags

    def of(self, rows: slice | Numbers) -> OwnTimes:
        """Of some of the records."""
        return OwnTimes(self.own[rows], self.since[rows], self.elsewhere[rows], self.is_known[rows])

    def columns(self) -> list[pa.Array]:
        """:data:`OWN_COLUMNS`."""
        return [pa.array(values, mask=~self.is_known) for values in (self.own, self.since, self.elsewhere)]


class _Blocked(NamedTuple):
    """When each record blocked its program; ``is_known`` is false where the wait for it was not recorded."""

    begin: Numbers
    end: Numbers
    is_known: Flags


def with_own_times(records: pa.Table) -> pa.Table:
    """``records`` (:data:`SOURCES`; all of some processes; maybe cpp_waits.COLUMNS) with :data:`OWN_COLUMNS`."""
    if OWN_COLUMNS[0] in records.column_names:
        return records
    for name, column in zip(OWN_COLUMNS, own_times(records).columns(), strict=True):
        records = records.append_column(name, column)
    return records


def no_own_times(count: int) -> OwnTimes:
    """Unknown own times for ``count`` records."""
    own, since, elsewhere = (np.zeros(count, np.int64) for _ in range(3))
    return OwnTimes(own, since, elsewhere, np.zeros(count, bool))


def own_times(records: pa.Table) -> OwnTimes:
    """The own times of ``records`` (:data:`SOURCES`, and cpp_waits.COLUMNS if known), all those of some processes."""
    count = len(records)
    times = no_own_times(count)
    if not count:
        return times
    issue, number = _numbers(records["issue_ns"]), _numbers(records["pg_seq"])
    blocked, is_message, is_rooted = (
        _blocked_intervals(records, issue),
        _flags(records["is_p2p"]),
        _is_rooted(records["op"]),
    )
    process, first = numbered(records.select(["rank", "attempt", "pid"]))
    group, _ = numbered(records.select(["pg", "group_ranks"]))
    for mine in split_by(process, np.arange(count)) if len(first) > 1 else [np.arange(count)]:
        rows = mine if (np.diff(issue[mine]) >= 0).all() else mine[np.argsort(issue[mine], kind="stable")]
        _fill(times, rows, issue, number, blocked, np.where(is_message, -1, group), is_rooted[rows])
    return times


def _fill(
    times: OwnTimes,
    rows: Numbers,
    issue: Numbers,
    number: Numbers,
    blocked: _Blocked,
    group: Numbers,
    is_rooted: Flags,
) -> None:
    """Fill in the records of one process, ``rows`` in order of issue."""
    at = issue[rows]
    begin, end, is_known = blocked.begin[rows], blocked.end[rows], blocked.is_known[rows]
    before = _blocked_before(at, begin[is_known], end[is_known])
    reference = _references(group[rows], at, np.where(is_known & ~is_rooted, end, _NEVER))
    if is_rooted.any():
        other = _references(group[rows], at, np.where(is_known, end, _NEVER))
        reference = np.where(is_rooted & (reference < 0), other, reference)
    mine = np.flatnonzero(reference >= 0)
    other = reference[mine]
    unknown_waits = np.concatenate(([0], np.cumsum(~is_known)))
    mine_known = unknown_waits[mine] == unknown_waits[other]
    mine, other = mine[mine_known], other[mine_known]
    blocked_since = before[mine] - before[other]
    place = rows[mine]
    times.own[place] = at[mine] - at[other] - blocked_since
    times.elsewhere[place] = np.maximum(blocked_since - (end[other] - begin[other]), 0)
    times.since[place] = number[rows[other]]
    times.is_known[place] = True


def _blocked_before(times: Numbers, begin: Numbers, end: Numbers) -> Numbers:
    """The length of the union of the intervals before each of ``times``."""
    if not len(begin):
        return np.zeros(len(times), np.int64)
    if (np.diff(begin) < 0).any():
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], end[order]
    start = begin.copy()
    np.maximum(start[1:], np.maximum.accumulate(end)[:-1], out=start[1:])
    length = np.maximum(end - start, 0)
    total = np.cumsum(length)
    last = np.searchsorted(start, times, side="right") - 1
    place = np.maximum(last, 0)
    until = total[place] - length[place] + np.minimum(times - start[place], length[place])
    return np.where(last < 0, 0, until)


def _references(group: Numbers, issue: Numbers, end: Numbers) -> Numbers:
    """For each record the last earlier one of its group whose wait had ended at its issue; -1 for none."""
    references = np.full(len(issue), -1, np.int64)
    for rows in split_by(group, np.arange(len(group))):
        if group[rows[0]] < 0 or len(rows) < 2:
            continue
        if (end[rows[:-1]] <= issue[rows[1:]]).all():
            references[rows[1:]] = rows[:-1]
            continue
        by_end = np.argsort(end[rows], kind="stable")
        latest = np.maximum.accumulate(by_end)
        ended = np.searchsorted(end[rows][by_end], issue[rows], side="right") - 1
        place = np.minimum(latest[np.maximum(ended, 0)], np.arange(len(rows)) - 1)
        is_there = (ended >= 0) & (place >= 0)
        references[rows[is_there]] = rows[place[is_there]]
    return references


def _is_rooted(op: pa.ChunkedArray) -> Flags:
    text = op.cast(pa.string()) if pa.types.is_dictionary(op.type) else op
    return _flags(pc.fill_null(pc.is_in(text, pa.array(_ROOTED)), False))


def _blocked_intervals(records: pa.Table, issue: Numbers) -> _Blocked:
    """A synchronous CPU call blocks its program throughout, others during a wait, also one of C++; on a device the measured
    time counts.
    """
    device = records["device"]
    text = device.cast(pa.string()) if pa.types.is_dictionary(device.type) else device
    on_cpu = pc.fill_null(pc.equal(text, "cpu"), True).to_numpy(zero_copy_only=False)
    is_async = _flags(records["is_async"])
    returned, waiting, waited, done, exposed = (
        _numbers(records[name], _UNKNOWN)
        for name in ("return_ns", "wait_begin_ns", "wait_end_ns", "device_end_ns", "exposed_ns")
    )
    if COLUMNS[0] in records.column_names:
        in_cpp, until = (_numbers(records[name], _UNKNOWN) for name in COLUMNS)
        waiting, waited = (
            np.where(in_cpp > _UNKNOWN, in_cpp, waiting),
            np.where(in_cpp > _UNKNOWN, until, waited),
        )
    end = np.where(on_cpu, np.where(is_async | (waited > _UNKNOWN), waited, returned), done)
    begin = np.where(is_async, np.where(waiting > _UNKNOWN, waiting, waited), issue)
    begin = np.where(on_cpu, begin, done - np.maximum(exposed, 0))
    is_known = (end > _UNKNOWN) & (on_cpu | (exposed > _UNKNOWN))
    return _Blocked(begin, np.maximum(end, begin), is_known)


def _numbers(column: pa.ChunkedArray, unknown: int = 0) -> Numbers:
    numbers: Numbers = pc.fill_null(column, unknown).to_numpy().astype(np.int64, copy=False)
    return numbers


def _flags(column: pa.ChunkedArray) -> Flags:
    flags: Flags = (
        column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()
    )
    return flags
