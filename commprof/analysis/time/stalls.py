"""Compute exposed and overlapped time of each rank by step: unions of the intervals of its collectives.

A collective blocks the program for ``exposed_ns`` until ``wait_end_ns``, or on a device until
``device_end_ns``. It is in progress from ``issue_ns`` (``device_begin_ns``) until its end. The end is
``device_end_ns`` if known, else ``wait_end_ns``. Exposed time is the length of the union of the blocked
intervals. Overlapped time is the length of the union of all intervals, blocked or in progress, minus the
exposed time. Concurrent waits therefore count once. The time of a collective that is issued in one step and
waited for in the next counts in the step in which it was spent.

If C++ waits (the table ``stalls``), no individual wait is recorded. In each of these intervals the program
was blocked for a time between two bounds. It was blocked on records without a recorded wait that were issued
since ``since_ns``. These records were in progress until the end of the interval at most. The bounds are added
to the known exposed time. Records of a device belong to the rows of ``stalls`` that describe when its stream
waited. The other records belong to the rows that describe when the thread waited. The times at which the host
issued a record and a wait determine which interval waited for the record.

This is not computed in SQL. Sorting the times of each process in arrays takes a fraction of the time of
window frames over all processes, and only the memory of one process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.cpp_waits import unseen_waits
from commprof.align.sequences.group_ids import numbered, placed_by
from commprof.errors import TraceError
from commprof.trace.reader import Scan
from commprof.trace.tables import arrow_schema, read_columns

Numbers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

PROCESS: Final = ("attempt", "rank", "pid")
_TIMES: Final = ("issue_ns", "wait_end_ns", "device_begin_ns", "device_end_ns", "exposed_ns")
# The columns of records that are needed in addition to PROCESS.
COLUMNS: Final = ("step", "purpose", "layer", "device", "is_async", *_TIMES)
_FURTHEST: Final = 1 << 61  # sums and differences of two such times fit into 64 bits
_SUMS: Final = ("exposed_ns", "low_ns", "high_ns", "overlapped_ns")
_MEASURES: Final = (("step", pa.int32()), *((name, pa.int64()) for name in _SUMS))
_OF_STALLS: Final = ("since_ns", "end_ns", "exposed_low_ns", "exposed_high_ns")
_BEFORE: Final = -1  # the step before the first one


class Known(NamedTuple):
    """Numbers, and flags that indicate which of the numbers are known."""

    values: Numbers
    known: Flags


class _Intervals(NamedTuple):
    """Intervals from ``starts`` to ``stops``, one for each of ``records``, in order of their start."""

    records: Numbers
    starts: Numbers
    stops: Numbers


class _Stalls(NamedTuple):
    """The intervals of one process in which C++ waited, and the records that each interval bounds.

    The interval with the number ``of_record[i]`` bounds the record ``records[i]``.
    """

    begins: Numbers
    ends: Numbers
    low: Numbers
    high: Numbers
    records: Numbers
    of_record: Numbers


class _Steps(NamedTuple):
    """The times of one process at which a step begins or ends, and the step that is current from each time on.

    The step is null after an end.
    """

    times: Numbers
    steps: pa.Array


def training_parts(steps: pa.Table, outside_steps: pa.Table) -> pa.Table:
    """Return ``steps``, with each step divided into the parts between the checkpoints within it.

    The result is an input of :func:`stall_times`. The time of a step excludes its checkpoints
    (``outside_ns``), and its exposed and overlapped time also exclude them.
    """
    is_divided = pc.and_(pc.greater(pc.fill_null(steps["outside_ns"], 0), 0), steps["end_ns"].is_valid())
    if not pc.any(is_divided).as_py():
        return steps
    passes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for row in outside_steps.filter(outside_steps["end_ns"].is_valid()).to_pylist():
        passes.setdefault(tuple(row[name] for name in PROCESS), []).append((row["begin_ns"], row["end_ns"]))
    for of_process in passes.values():
        of_process.sort()
    parts = []
    for row in steps.filter(is_divided).to_pylist():
        begin, of_process = row["begin_ns"], passes.get(tuple(row[name] for name in PROCESS), [])
        for first, end in islice(of_process, bisect_left(of_process, (begin,)), None):
            if end > row["end_ns"]:
                break
            if begin <= first:
                parts.append(row | {"begin_ns": begin, "end_ns": first})
                begin = end
        parts.append(row | {"begin_ns": begin})
    divided = [part for part in parts if part["begin_ns"] < part["end_ns"]]
    return pa.concat_tables(
        [steps.filter(pc.invert(is_divided)), pa.Table.from_pylist(divided, steps.schema)]
    )


def stall_times(
    collectives: pa.Table | Scan, steps: pa.Table, by: Sequence[str] = (), stalls: pa.Table | None = None
) -> pa.Table:
    """Return exposed_ns, low_ns, high_ns and overlapped_ns per process, step and combination of ``by``.

    exposed_ns is from the waits of the records. low_ns and high_ns bound the additional time that C++ waited
    (``stalls``). overlapped_ns is an upper bound. The step is -1 before the first step, and null after the
    last step and between steps.

    Raises:
        TraceError: A file cannot be read, or it contains times that cannot be summed.
    """
    return stall_times_by(collectives, steps, [by], stalls)[0]


def stall_times_by(
    collectives: pa.Table | Scan,
    steps: pa.Table,
    several: Sequence[Sequence[str]],
    stalls: pa.Table | None = None,
) -> list[pa.Table]:
    """Return :func:`stall_times` for each list of columns in ``several``, reading the records once."""
    several = [[name for name in by if name not in (*PROCESS, "step")] for by in several]
    stalled = {} if stalls is None else {key: rows for rows, key in by_process(stalls)}
    stall_columns = ("is_async", "layer", "purpose") if stalled else ()
    columns = list(
        dict.fromkeys((*PROCESS, "device", *_TIMES, *stall_columns, *(n for by in several for n in by)))
    )
    steps_of = {key: rows for rows, key in by_process(steps.select([*PROCESS, "step", "begin_ns", "end_ns"]))}
    of_processes = [
        _of_process(rows, key, steps_of.get(key), stalled.get(key), several)
        for part in _parts(collectives, columns)
        for rows, key in by_process(part)
    ]
    return [_as_one(by, [tables[place] for tables in of_processes]) for place, by in enumerate(several)]


def _as_one(by: Sequence[str], tables: Sequence[pa.Table]) -> pa.Table:
    schema = arrow_schema("collectives")
    fields = [schema.field(name) for name in (*by, *PROCESS)]
    fields += [pa.field(name, kind) for name, kind in _MEASURES]
    answer = pa.schema([field.with_nullable(True).remove_metadata() for field in fields])
    table = pa.concat_tables([answer.empty_table(), *(table.cast(answer) for table in tables)])
    return _added_up(table, [*by, *PROCESS, "step"]).select(answer.names).cast(answer)


def _parts(collectives: pa.Table | Scan, columns: list[str]) -> Iterator[pa.Table]:
    """Yield the rows in batches. All rows of a process are in the same batch."""
    if not isinstance(collectives, Scan):
        yield collectives.select(columns)
        return
    of_process: dict[tuple[str, ...], list[Path]] = {}
    # The name of a file contains rank, attempt and process, and a number if the process recorded more than once.
    for file in collectives.files:
        of_process.setdefault(tuple(file.stem.split("-")[:4]), []).append(file)
    for files in of_process.values():
        yield pa.concat_tables([read_columns(file, columns) for file in files])
    yield collectives.rest.select(columns)


def by_process(rows: pa.Table) -> Iterator[tuple[pa.Table, tuple[int, ...]]]:
    """Yield the rows of each process and the key of the process."""
    if not len(rows):
        return
    keys = [rows[name].to_numpy() for name in PROCESS]
    if all(key[0] == key.min() == key.max() for key in keys):
        yield rows, tuple(int(key[0]) for key in keys)
        return
    order = np.lexsort(keys[::-1])
    # One take for all processes, because the cost of a take grows with the number of chunks, and the file of each rank
    # is a chunk.
    ordered = rows.take(pa.array(order)) if np.any(np.diff(order) != 1) else rows
    changes = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(order)]
    for begin, end in pairwise(bounds):
        yield ordered.slice(begin, end - begin), tuple(int(key[order[begin]]) for key in keys)


def _known(rows: pa.Table, name: str) -> Known:
    column = rows[name].combine_chunks()
    if column.null_count == len(column):
        return Known(*(np.broadcast_to(np.zeros(1, kind), len(column)) for kind in (np.int64, bool)))
    known = column.is_valid().to_numpy(zero_copy_only=False)
    values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    if len(values) and (values.max() > _FURTHEST or values.min() < -_FURTHEST):
        raise TraceError(
            f"the records of the run have a {name} that cannot be added up. Some file of the run is damaged; copy it again "
            "from where it was recorded"
        )
    return Known(values, known)


def _of_process(
    rows: pa.Table,
    process: tuple[int, ...],
    steps: pa.Table | None,
    stalls: pa.Table | None,
    several: Sequence[Sequence[str]],
) -> list[pa.Table]:
    blocked, covered = _blocked_and_covered(rows)
    stalled = None if stalls is None else _stalled(rows, stalls, blocked)
    if stalled is not None:
        issue, device_begin = (_known(rows, name) for name in ("issue_ns", "device_begin_ns"))
        begin = np.where(device_begin.known, device_begin.values, issue.values)[stalled.records]
        end = stalled.ends[stalled.of_record]
        ran = _Intervals(stalled.records, np.minimum(begin, end), end)
        covered = _in_order(_Intervals(*map(np.concatenate, zip(covered, ran, strict=True))))
    cuts = _cuts(steps)
    return [_by(rows, process, by, blocked, covered, cuts, stalled) for by in several]


def _by(
    rows: pa.Table,
    process: tuple[int, ...],
    by: Sequence[str],
    times_held: _Intervals,
    times_covered: _Intervals,
    cuts: _Steps,
    stalled: _Stalls | None,
) -> pa.Table:
    codes, firsts = _combinations(rows, by)
    places = len(cuts.steps)  # an interval before the first time belongs to the first step entry
    exposed = _lengths(times_held, codes, cuts, places)
    covered = _lengths(times_covered, codes, cuts, places)
    bounds = {} if stalled is None else _bounds(stalled, codes, cuts, places)
    cells = np.array(sorted({*covered, *bounds}), np.int64)
    chosen = rows.select(list(by)).take(pa.array(firsts[cells // places])) if by else None
    columns = {name: chosen[name] for name in by} if chosen is not None else {}
    columns |= {
        name: pa.array(np.full(len(cells), value, np.int64))
        for name, value in zip(PROCESS, process, strict=True)
    }
    columns["step"] = cuts.steps.take(pa.array(cells % places))
    sums = [
        (exposed.get(cell, 0), *bounds.get(cell, (0, 0)), covered.get(cell, 0)) for cell in cells.tolist()
    ]
    values = np.array(sums, np.int64).reshape(-1, len(_SUMS))
    # Time that is certainly exposed is not overlapped.
    values[:, -1] = np.maximum(0, values[:, -1] - values[:, 0] - values[:, 1])
    columns |= {name: pa.array(values[:, place]) for place, name in enumerate(_SUMS)}
    return pa.table(columns)


def _added_up(table: pa.Table, keys: list[str]) -> pa.Table:
    """Return one row per combination of ``keys``.

    Rows are summed because the step null can occur between any two steps.
    """
    sums = table.group_by(keys, use_threads=False).aggregate([(name, "sum") for name in _SUMS])
    return sums.rename_columns([*keys, *_SUMS]) if len(sums) else table


def _stalled(rows: pa.Table, stalls: pa.Table, blocked: _Intervals) -> _Stalls | None:
    """Return the ``stalls`` of a process, and the records without a recorded wait that each stall bounds.

    The lower bound excludes time that is known to be exposed, and time that was already counted for the
    previous interval.
    """
    on_device = stalls["device_end_ns"].is_valid().to_numpy(zero_copy_only=False)
    parts = [
        part
        for place, rows_of_place in (
            ("device", stalls.filter(on_device)),
            ("host", stalls.filter(~on_device)),
        )
        if len(rows_of_place)
        and (part := _stalled_at(rows, rows_of_place, blocked, place == "device")) is not None
    ]
    if len(parts) < 2:
        return parts[0] if parts else None
    first, second = parts
    shifted = second._replace(of_record=second.of_record + len(first.ends))
    return _Stalls(*map(np.concatenate, zip(first, shifted, strict=True)))


def _stalled_at(rows: pa.Table, stalls: pa.Table, blocked: _Intervals, on_device: bool) -> _Stalls | None:
    """Return the result of :func:`_stalled` for either the device rows or the host rows of ``stalls``."""
    stalls = stalls.take(pa.array(np.argsort(stalls["end_ns"].to_numpy(), kind="stable")))
    since, issue_ends, low, high = (_known(stalls, name).values for name in _OF_STALLS)
    begins, ends = (
        _known(stalls, f"device_{name}" if on_device else name).values for name in ("begin_ns", "end_ns")
    )
    records = np.flatnonzero(unseen_waits(rows, on_device))
    issue = _known(rows, "issue_ns").values[records]
    of_record = np.searchsorted(issue_ends, issue, "left")
    inside = of_record < len(issue_ends)
    inside[inside] = since[of_record[inside]] <= issue[inside]
    if not inside.any():
        return None
    latest = np.concatenate(([-(1 << 62)], np.maximum.accumulate(ends)[:-1]))
    twice = np.clip(latest - begins, 0, ends - begins)
    _, starts, stops = _union(blocked, np.zeros(len(blocked.starts), np.int64))
    edges = np.concatenate(([0], np.cumsum(stops - starts)))
    known = _length_until(ends, starts, stops, edges) - _length_until(begins, starts, stops, edges)
    low = np.clip(low - twice - known, 0, ends - begins)
    return _Stalls(begins, ends, low, np.clip(high, low, ends - begins), records[inside], of_record[inside])


def _length_until(moments: Numbers, starts: Numbers, stops: Numbers, edges: Numbers) -> Numbers:
    """Return the length of disjoint intervals before each moment.

    Args:
        edges: The cumulative lengths of the intervals.
    """
    before = np.searchsorted(starts, moments, "right")
    if not len(starts):
        return np.zeros(len(moments), np.int64)
    last = np.maximum(before - 1, 0)
    beyond = np.where(before > 0, np.maximum(stops[last] - moments, 0), 0)
    return np.asarray(edges[before] - beyond)


def _bounds(stalled: _Stalls, codes: Numbers, cuts: _Steps, places: int) -> dict[int, tuple[int, int]]:
    """Return the lower and upper bound by cell. The number of a cell is combination x ``places`` + place.

    It is not known for which of several combinations an interval blocked the program. Each of these
    combinations gets the whole upper bound and none of the lower bound. If an interval extends across the end
    of a step, each side gets the part of the lower bound that does not fit into the other side.
    """
    width = int(codes.max(initial=0)) + 1
    pairs = np.unique(stalled.of_record * width + codes[stalled.records])
    which, code = pairs // width, pairs % width
    alone = np.bincount(which, minlength=len(stalled.ends)) == 1
    edges = np.concatenate(([-(1 << 62)], cuts.times, [1 << 62]))
    bounds: dict[int, tuple[int, int]] = {}
    for number, combination in zip(which.tolist(), code.tolist(), strict=True):
        begin, end = int(stalled.begins[number]), int(stalled.ends[number])
        low, high = int(stalled.low[number]) if alone[number] else 0, int(stalled.high[number])
        for place in range(
            int(np.searchsorted(cuts.times, begin, "right")),
            int(np.searchsorted(cuts.times, end, "left")) + 1,
        ):
            part = min(end, int(edges[place + 1])) - max(begin, int(edges[place]))
            cell = combination * places + place
            before = bounds.get(cell, (0, 0))
            bounds[cell] = before[0] + max(0, low - (end - begin - part)), before[1] + min(part, high)
    return bounds


def _combinations(rows: pa.Table, by: Sequence[str]) -> tuple[Numbers, Numbers]:
    """Return the number of the combination of ``by`` of each row, and the first row of each combination."""
    return numbered(rows.select(list(by))) if by else (np.zeros(len(rows), np.int64), np.zeros(1, np.int64))


def _blocked_and_covered(rows: pa.Table) -> tuple[_Intervals, _Intervals]:
    """Return the blocked intervals of the records, and all covered intervals.

    The covered intervals are the blocked intervals together with the in-progress intervals that extend beyond
    them.
    """
    device = rows["device"].combine_chunks()
    on_host = pc.fill_null(pc.equal(device.cast(pa.string()), "cpu"), True).to_numpy(zero_copy_only=False)
    issue, wait_end, device_begin, device_end, exposed = (_known(rows, name) for name in _TIMES)
    until = _either(on_host, wait_end, device_end)
    holds = exposed.known & (exposed.values > 0) & until.known
    blocked = _Intervals(np.flatnonzero(holds), (until.values - exposed.values)[holds], until.values[holds])
    begin = _either(on_host, issue, device_begin)
    device_first = device_end.known & (~wait_end.known | (device_end.values < wait_end.values))
    end = _either(~on_host | device_first, device_end, wait_end)
    runs = begin.known & end.known & (end.values > begin.values)
    runs &= ~holds | (begin.values < until.values - exposed.values) | (end.values > until.values)
    ran = _Intervals(np.flatnonzero(runs), begin.values[runs], end.values[runs])
    blocked = _in_order(blocked)
    return blocked, _in_order(_Intervals(*map(np.concatenate, zip(blocked, ran, strict=True))))


def _in_order(intervals: _Intervals) -> _Intervals:
    # The stable sort is fast if times are nearly in order.
    order = np.argsort(intervals.starts, kind="stable")
    return _Intervals(*(values[order] for values in intervals))


def _either(first: Flags, these: Known, those: Known) -> Known:
    if first.all():
        return these
    if not first.any():
        return those
    return Known(np.where(first, these.values, those.values), np.where(first, these.known, those.known))


def _cuts(steps: pa.Table | None) -> _Steps:
    """Return the times at which intervals are cut.

    If a step begins at the time at which a step ends, the begin takes precedence.
    """
    moments: dict[int, int | None] = {}
    rows = [] if steps is None else steps.select(["step", "begin_ns", "end_ns"]).to_pylist()
    rows = sorted((row for row in rows if row["step"] >= 0), key=lambda row: int(row["step"]))
    for row in rows:
        if row["end_ns"] is not None:
            moments.setdefault(row["end_ns"], None)
    for row in rows:
        moments[row["begin_ns"]] = row["step"]
    times = sorted(moments)
    inside = [_BEFORE, *(moments[time] for time in times)]
    return _Steps(np.array(times, np.int64), pa.array(inside, pa.int32()))


def _lengths(intervals: _Intervals, code: Numbers, cuts: _Steps, places: int) -> dict[int, int]:
    """Return the length of the union of the intervals of each combination between two cuts.

    The keys of the result are combination x ``places`` + place.

    Args:
        code: The combination of each record.
    """
    codes, starts, stops = _union(intervals, code[intervals.records])
    if not len(starts):
        return {}
    first = np.searchsorted(cuts.times, starts, "right")
    last = np.searchsorted(cuts.times, stops, "left")
    span_numbers = np.repeat(np.arange(len(starts)), last - first + 1)
    place = np.arange(len(span_numbers)) - np.repeat(
        np.cumsum(last - first + 1) - (last - first + 1), last - first + 1
    )
    place += first[span_numbers]
    edges = np.concatenate(([-(1 << 62)], cuts.times, [1 << 62]))
    lengths = np.minimum(stops[span_numbers], edges[place + 1]) - np.maximum(
        starts[span_numbers], edges[place]
    )
    cells = codes[span_numbers] * places + place
    order = np.argsort(cells, kind="stable")
    cells, lengths = cells[order], lengths[order]
    firsts = np.flatnonzero(np.diff(cells, prepend=-1))
    sums = np.add.reduceat(lengths, firsts)
    return dict(zip(cells[firsts].tolist(), sums.tolist(), strict=True))


def _union(intervals: _Intervals, codes: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the part of each interval that earlier intervals of its combination do not cover.

    The parts are disjoint, and they are returned as codes, starts and stops.
    """
    _, starts, stops = intervals
    if not len(starts):
        return codes, starts, stops
    if codes.any():  # if not, there is only one combination
        order = placed_by(codes)
        codes, starts, stops = codes[order], starts[order], stops[order]
    before = np.full(len(starts), -(1 << 62))
    bounds = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    low, high = int(starts.min()), int(stops.max())
    if (high - low + 1) * len(bounds) < 1 << 62:
        shift = _shift(codes, high - low + 1)
        furthest = np.maximum.accumulate(stops - low + shift)
        before[1:] = furthest[:-1] - shift[1:] + low
    else:
        for begin, end in pairwise(bounds):
            before[begin + 1 : end] = np.maximum.accumulate(stops[begin:end])[:-1]
    starts = np.maximum(starts, before)
    adds = stops > starts
    return codes[adds], starts[adds], stops[adds]


def _shift(codes: Numbers, width: int) -> Numbers:
    """Return a multiple of ``width`` for each of the sorted ``codes``, so that the ranges of codes do not overlap."""
    return np.concatenate(([0], np.cumsum(np.diff(codes) != 0))) * width
