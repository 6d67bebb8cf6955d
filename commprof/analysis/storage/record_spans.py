"""Spans of time on one clock, one for each record: the input of the index of a run.

A span lasts from the issue of a record to its last known time: its return, the end of its wait, or the end on the
device. Where C++ waited for several records (:mod:`commprof.align.ranks.cpp_waits`), the last of them has the wait.

Spans of one process overlap. To attribute each moment to one span, each has an own part, ``busy_ns``: the final part of
the span, after the end of every span that began earlier. Own parts do not overlap, so their lengths add up to the time in
which any collective was under way. ``still_ns`` is the same for the exposed time (``exposed_ns``, up to ``held_end_ns``).
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

# Columns that differ from record to record. Each combination of the others is stored once.
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
# Beyond any clock; a wall clock, which imported runs use, reaches it in 2043. Damaged times are clipped to it, so that
# differences fit 64 bits.
_FARTHEST: Final = 1 << 61


class Spans(NamedTuple):
    """Begin and end of each record, and the end of its exposed time; arrays with an element for each record."""

    begin: Numbers
    end: Numbers
    held_end: Numbers
    is_held: npt.NDArray[np.bool_]  # the others have no held_end
    unknown_clocks: int  # rows whose clock was never compared with the reference: their times are not shifted


class Own(NamedTuple):
    """What needs all spans of a process: own parts of the spans (``busy``) and of their exposed time (``still``), and the
    program's own time between them (``times``)."""

    busy: npt.NDArray[np.unsignedinteger]
    still: npt.NDArray[np.unsignedinteger]
    times: own_times.OwnTimes

    def of(self, rows: slice) -> Own:
        """The same for some of the records."""
        return Own(self.busy[rows], self.still[rows], self.times.of(rows))


def spans(records: pa.Table, clock: ReferenceClock | None) -> Spans:
    """The spans of ``records`` (:data:`TIME_COLUMNS`); ``clock`` None: all processes read one clock."""
    shift, unknown = _shift(records, clock)
    issue = _filled(records["issue_ns"], 0)
    held_end, _, is_held = _exposed(records)
    return Spans(issue + shift, _end(records, issue) + shift, held_end + shift, is_held, unknown)


def begins(records: pa.Table, clock: ReferenceClock | None) -> Numbers:
    """When the :func:`spans` of ``records`` begin."""
    begin: Numbers = _filled(records["issue_ns"], 0) + _shift(records, clock)[0]
    return begin


def _shift(records: pa.Table, clock: ReferenceClock | None) -> tuple[Numbers | int, int]:
    """The offset to add to the times of each record, and for how many records it is not known."""
    if clock is None or not len(records):
        return 0, 0
    readings = clock.readings(records)
    return np.where(readings.known, readings.offset_ns, 0), int((~readings.known).sum())


def own(records: pa.Table) -> Own:
    """The own parts of all ``records`` (:data:`TIME_COLUMNS`) of some processes."""
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
    """The last known time of each record."""
    end = issue.copy()
    for name in _ENDS:
        np.maximum(end, _filled(records[name], -_FARTHEST), out=end)
    _, in_cpp, is_long = _cpp_waits(records)
    return np.maximum(end, np.where(is_long, in_cpp, end))


def _narrow(lengths: Numbers) -> npt.NDArray[np.unsignedinteger]:
    """``lengths`` in 32 bits if they fit: those of all records are in memory at once."""
    return lengths.astype(np.uint32 if lengths.max(initial=0) < 1 << 32 else np.uint64)


def with_spans(records: pa.Table, part_spans: Spans, own: Own, kinds: Combinations) -> pa.Table:
    """``records`` as rows of the index: the columns of :data:`SPANS`."""
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
    """End and length of the exposed time of each record, and whether it is known and above 0 (docs/times.md)."""
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
    """Begin and end of the wait of C++ for each record, and which have one that is longer than 0."""
    if CPP_WAITS[0] not in records.column_names:
        none = np.zeros(len(records), np.int64)
        return none, none, none > 0
    begin, end = (_filled(records[name], 0) for name in CPP_WAITS)
    return begin, end, end > begin


def own_parts(begin: Numbers, end: Numbers) -> Numbers:
    """The length of each span's own part: its end that no span that began earlier covers.

    Spans count in order of their begin, and in the given order if they begin together. The lengths add up to that of the
    union of the spans: each part is ``[end - length, end)``, and no two of them overlap.
    """
    if not (begin[1:] < begin[:-1]).any():
        return _adding_to_reach(begin, end)
    order = np.argsort(begin, kind="stable")
    length = np.empty(len(begin), np.int64)
    length[order] = _adding_to_reach(begin[order], end[order])
    return length


def _adding_to_reach(begin: Numbers, end: Numbers) -> Numbers:
    """:func:`own_parts` of spans in order of their begin."""
    reached = np.maximum.accumulate(end)
    start = begin.copy()
    np.maximum(start[1:], reached[:-1], out=start[1:])
    lengths: Numbers = np.maximum(end - start, 0)
    return lengths


def _filled(column: pa.ChunkedArray, value: int) -> Numbers:
    filled = pc.fill_null(column, value).to_numpy().astype(np.int64, copy=False)
    clipped: Numbers = np.clip(filled, -_FARTHEST, _FARTHEST)
    return clipped
