"""Spans of time on one clock, one for each record. They are the input of the index of a run.

A span begins when the record is issued. It ends at the last known time of the record: its return, the end of its wait,
or its end on the device. If C++ waited for several records at once (:mod:`commprof.align.ranks.cpp_waits`), the wait
belongs to the last of these records.

The spans of one process overlap. To attribute each moment to one span, each span has an own part. This is the final
part of the span, after the end of every span that began earlier. ``busy_ns`` is the length of the own part. Own parts
do not overlap, so their lengths add up to the time in which any collective was in progress. ``still_ns`` is the length
of the own part of the exposed time. The exposed time ends at ``held_end_ns`` and lasts ``exposed_ns``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks import own_times
from commprof.align.ranks.cpp_waits import COLUMNS as CPP_WAITS
from commprof.align.ranks.reference_clock import ReferenceClock
from commprof.align.sequences.group_ids import numbered, split_by
from commprof.analysis.columns.distinct_combinations import Combinations
from commprof.schema import COLLECTIVES

Numbers = npt.NDArray[np.int64]

# Columns that differ from record to record. Each combination of the other columns is stored only once.
OWN_COLUMNS: Final = (
    "rank",
    "attempt",
    "pid",
    "seq",
    "step",
    "micro_step",
    "pg_seq",
    "group_rank",
    "coalesce_id",
    "replays",
    "issue_ns",
    "return_ns",
    "wait_begin_ns",
    "wait_end_ns",
    "device_begin_ns",
    "device_end_ns",
    "exposed_ns",
)
KIND_COLUMNS: Final = tuple(name for name in COLLECTIVES.names if name not in OWN_COLUMNS)
_ARROW: Final = {"string": pa.string(), "bool": pa.bool_(), "int32": pa.int32(), "int64": pa.int64()}
KINDS: Final = pa.schema([(name, _ARROW[COLLECTIVES.column(name).type]) for name in KIND_COLUMNS])
SPAN_COLUMNS: Final = ("begin_ns", "end_ns", "busy_ns", "held_end_ns", "still_ns")
SPANS: Final = pa.schema(
    [
        *((name, _ARROW[COLLECTIVES.column(name).type]) for name in OWN_COLUMNS),
        ("kind", pa.int32()),
        *((name, pa.int64()) for name in (*SPAN_COLUMNS, *own_times.OWN_COLUMNS)),
    ]
)
_ENDS: Final = ("return_ns", "wait_end_ns", "device_end_ns")
TIME_COLUMNS: Final = tuple(
    dict.fromkeys(
        ("rank", "attempt", "pid", "seq", "issue_ns", *_ENDS, "exposed_ns", "device", *own_times.SOURCES)
    )
)
# A limit in ns that no clock reaches. A wall clock, which imported runs use, reaches it in 2043. Damaged times are
# clipped to this limit, so that differences fit into 64 bits.
_FARTHEST: Final = 1 << 61


class Spans(NamedTuple):
    """Three times of each record: its begin, its end, and the end of its exposed time.

    Each array has one element per record.
    """

    begin: Numbers
    end: Numbers
    held_end: Numbers
    is_held: npt.NDArray[np.bool_]  # whether held_end is valid
    # The number of records whose clock was never compared with the reference clock. Their times are not shifted.
    unknown_clocks: int


class Own(NamedTuple):
    """Values whose computation needs all spans of a process.

    ``busy`` are the own parts of the spans, and ``still`` are the own parts of their exposed time, in ns. ``times`` is
    the own time of the program between the spans.
    """

    busy: npt.NDArray[np.unsignedinteger]
    still: npt.NDArray[np.unsignedinteger]
    times: own_times.OwnTimes

    def of(self, rows: slice) -> Own:
        """Return the values of some of the records."""
        return Own(self.busy[rows], self.still[rows], self.times.of(rows))


def spans(records: pa.Table, clock: ReferenceClock | None) -> Spans:
    """Return the spans of ``records``.

    Args:
        records: The records with the columns :data:`TIME_COLUMNS`.
        clock: The reference clock, or None if all processes read the same clock.
    """
    shift, unknown = _shift(records, clock)
    issue = _filled(records["issue_ns"], 0)
    held_end, _, is_held = _exposed(records)
    return Spans(issue + shift, _end(records, issue) + shift, held_end + shift, is_held, unknown)


def begins(records: pa.Table, clock: ReferenceClock | None) -> Numbers:
    """Return the begin of each of the :func:`spans` of ``records``."""
    begin: Numbers = _filled(records["issue_ns"], 0) + _shift(records, clock)[0]
    return begin


def _shift(records: pa.Table, clock: ReferenceClock | None) -> tuple[Numbers | int, int]:
    """Return the offset to add to the times of each record, and the number of records with an unknown offset."""
    if clock is None or not len(records):
        return 0, 0
    readings = clock.readings(records)
    return np.where(readings.known, readings.offset_ns, 0), int((~readings.known).sum())


def own(records: pa.Table) -> Own:
    """Return the own parts of ``records`` (:data:`TIME_COLUMNS`), which must be all records of some processes."""
    issue = _filled(records["issue_ns"], 0)
    end = _end(records, issue)
    held_end, exposed, is_held = _exposed(records)
    process, first = numbered(records.select(["rank", "attempt", "pid"]))
    busy, still = np.zeros(len(records), np.int64), np.zeros(len(records), np.int64)
    rows = np.arange(len(records))
    for mine in split_by(process, rows) if len(first) > 1 else [rows]:
        busy[mine] = own_parts(issue[mine], end[mine])
        stalled = mine[is_held[mine]]
        still[stalled] = own_parts(held_end[stalled] - exposed[stalled], held_end[stalled])
    return Own(_narrow(busy), _narrow(still), own_times.own_times(records))


def _end(records: pa.Table, issue: Numbers) -> Numbers:
    """Return the last known time of each record."""
    end = issue.copy()
    for name in _ENDS:
        np.maximum(end, _filled(records[name], -_FARTHEST), out=end)
    _, in_cpp, is_long = _cpp_waits(records)
    return np.maximum(end, np.where(is_long, in_cpp, end))


def _narrow(lengths: Numbers) -> npt.NDArray[np.unsignedinteger]:
    """Return ``lengths`` in 32 bits if they fit, to save memory: the lengths of all records are in memory at once."""
    return lengths.astype(np.uint32 if lengths.max(initial=0) < 1 << 32 else np.uint64)


def with_spans(records: pa.Table, part_spans: Spans, own: Own, kinds: Combinations) -> pa.Table:
    """Return ``records`` as rows of the index, with the columns of :data:`SPANS`."""
    added = [
        pa.array(kinds.number(records).astype(np.int32)),
        pa.array(part_spans.begin),
        pa.array(part_spans.end),
        pa.array(own.busy.astype(np.int64)),
        pa.array(part_spans.held_end, mask=~part_spans.is_held),
        pa.array(own.still.astype(np.int64)),
        *own.times.columns(),
    ]
    columns = [records[name].cast(SPANS.field(name).type) for name in OWN_COLUMNS]
    return pa.table([*columns, *added], schema=SPANS)


def _exposed(records: pa.Table) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
    """Return end and length of the exposed time of each record, and whether it is known and above 0 (docs/times.md)."""
    device = records["device"]
    text = device.cast(pa.string()) if pa.types.is_dictionary(device.type) else device
    on_host = pc.or_(pc.is_null(text), pc.fill_null(pc.equal(text, "cpu"), True))
    until = pc.if_else(on_host, records["wait_end_ns"], records["device_end_ns"])
    exposed = _filled(records["exposed_ns"], 0)
    known = pc.is_valid(until).to_numpy(zero_copy_only=False) & (exposed > 0)
    begin, end, is_long = _cpp_waits(records)
    return (
        np.where(is_long, end, _filled(until, 0)),
        np.where(is_long, end - begin, exposed),
        known | is_long,
    )


def _cpp_waits(records: pa.Table) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
    """Return begin and end of the wait of C++ for each record, and whether this wait is longer than 0."""
    if CPP_WAITS[0] not in records.column_names:
        none = np.zeros(len(records), np.int64)
        return none, none, none > 0
    begin, end = (_filled(records[name], 0) for name in CPP_WAITS)
    return begin, end, end > begin


def own_parts(begin: Numbers, end: Numbers) -> Numbers:
    """Return the length of the own part of each span: the final part that no earlier span covers.

    The order of the spans is the order of their begin. Spans that begin together keep the given order. The own part of
    a span is ``[end - length, end)``. Own parts do not overlap, so their lengths add up to the length of the union of
    the spans.
    """
    if not (begin[1:] < begin[:-1]).any():
        return _adding_to_reach(begin, end)
    order = np.argsort(begin, kind="stable")
    length = np.empty(len(begin), np.int64)
    length[order] = _adding_to_reach(begin[order], end[order])
    return length


def _adding_to_reach(begin: Numbers, end: Numbers) -> Numbers:
    """Return :func:`own_parts` for spans that are sorted by their begin."""
    reached = np.maximum.accumulate(end)
    start = begin.copy()
    np.maximum(start[1:], reached[:-1], out=start[1:])
    lengths: Numbers = np.maximum(end - start, 0)
    return lengths


def _filled(column: pa.ChunkedArray, value: int) -> Numbers:
    filled = pc.fill_null(column, value).to_numpy().astype(np.int64, copy=False)
    clipped: Numbers = np.clip(filled, -_FARTHEST, _FARTHEST)
    return clipped
