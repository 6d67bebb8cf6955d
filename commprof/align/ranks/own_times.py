"""Compute own time: how long the program of a rank ran between two collectives, without exposed communication.

The functions are pure. A rank arrives late at a collective because of its own time, or because earlier waits
blocked it. Own time is measured from a reference. The reference is the last earlier collective of the same
group for which the program waited and in which every member waits for every other member. A rooted collective
is a reference only for other rooted collectives, in a group that has no collectives of the other kind. The
time between the two issues is the sum of own time and of the recorded waits that blocked the program, in the
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
_UNKNOWN: Final = -(1 << 62)  # earlier than any time
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
    """The own times of records, if they are known.

    Attributes:
        own: The own time of each record, in ns.
        since: The number in the group of the reference of each record.
        elsewhere: The time in ns that the program was blocked outside of the reference.
        is_known: Whether the values of each record are known.
    """

    own: Numbers
    since: Numbers
    elsewhere: Numbers
    is_known: Flags

    def of(self, rows: slice | Numbers) -> OwnTimes:
        """Return the own times of some of the records."""
        return OwnTimes(self.own[rows], self.since[rows], self.elsewhere[rows], self.is_known[rows])

    def columns(self) -> list[pa.Array]:
        """Return :data:`OWN_COLUMNS` as arrays, with null for unknown values."""
        return [pa.array(values, mask=~self.is_known) for values in (self.own, self.since, self.elsewhere)]


class _Blocked(NamedTuple):
    """The interval in which each record blocked its program.

    ``is_known`` is false if the wait for the record was not recorded.
    """

    begin: Numbers
    end: Numbers
    is_known: Flags


def with_own_times(records: pa.Table) -> pa.Table:
    """Return ``records`` with :data:`OWN_COLUMNS`.

    Args:
        records: All records of some processes, with the columns :data:`SOURCES`, and optionally
            cpp_waits.COLUMNS.
    """
    if OWN_COLUMNS[0] in records.column_names:
        return records
    for name, column in zip(OWN_COLUMNS, own_times(records).columns(), strict=True):
        records = records.append_column(name, column)
    return records


def no_own_times(count: int) -> OwnTimes:
    """Return unknown own times for ``count`` records."""
    own, since, elsewhere = (np.zeros(count, np.int64) for _ in range(3))
    return OwnTimes(own, since, elsewhere, np.zeros(count, bool))


def own_times(records: pa.Table) -> OwnTimes:
    """Return the own times of ``records``.

    Args:
        records: All records of some processes, with the columns :data:`SOURCES`, and cpp_waits.COLUMNS if
            they are known.
    """
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
    """Fill in the values of the records of one process. ``rows`` must be in order of issue."""
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
    """Return the length of the union of the intervals before each of ``times``."""
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
    """Return for each record the last earlier record of its group whose wait had ended when the record was issued.

    The value is -1 if there is no such record.
    """
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
    """Return the interval in which each record blocked its program.

    A synchronous CPU call blocks its program throughout. Other CPU calls block it during a wait, including a
    wait in C++. On a device, the measured exposed time counts.
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
