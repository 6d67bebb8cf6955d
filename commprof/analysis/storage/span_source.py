"""The spans of a run as a stream, in order of time if the file of each process is in order.

A process writes its records as it issues them, so its file is usually in order. The reader merges the files of several
processes. The engine sorts the stream instead in two cases: some files are not in order (imported traces, clocks that
were set back), or there are too many files to read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commprof.align.ranks import cpp_waits
from commprof.align.ranks.cpp_waits import CppWaits
from commprof.align.ranks.reference_clock import ReferenceClock
from commprof.analysis.columns.distinct_combinations import Combinations
from commprof.analysis.storage.record_spans import (
    KINDS,
    SPANS,
    TIME_COLUMNS,
    Own,
    begins,
    own,
    spans,
    with_spans,
)
from commprof.analysis.stragglers import arrivals
from commprof.errors import TraceError
from commprof.schema import COLLECTIVES
from commprof.trace.reader import Run, Scan
from commprof.trace.tables import column_parts, read_columns

ORDER: Final = ("begin_ns", "rank", "attempt", "pid", "seq")
_FEWEST_SCANNED: Final = 100_000  # tables with more rows are read file by file
_MOST_OPEN: Final = 64  # maximum number of files that are read at once
_ROWS_AT_ONCE: Final = 1 << 19  # maximum number of rows in memory, over all files
_MOST_ROWS: Final = 1 << 16  # maximum number of rows in memory of one file
# Number of rows of one file that are merged at a time. It is small, so that the rows stay in the caches of the CPU.
_ROWS_IN_ORDER: Final = 1 << 13

Progress = Callable[[int, int], None]


class _Source(NamedTuple):
    """The records of some processes, and the values that need all of these records at once (``own``)."""

    own: Own
    key: tuple[int, ...]
    is_in_order: bool
    rows: Callable[[int], Iterator[pa.Table]]  # iterates over batches; the argument is their number of rows


class SpanSource:
    """The spans of a run as a stream, and facts that are collected while the stream is read.

    Attributes:
        is_in_order: Whether the stream is in the order :data:`ORDER`.
        failure: The error that ended the stream, or None.

    Raises:
        TraceError: A file of the run is damaged.
    """

    def __init__(self, run: Run, progress: Progress) -> None:
        self.kinds = Combinations(KINDS)
        self.clock = _clock(run)
        self.unknown_clocks = 0
        self.failure: TraceError | None = None
        self._sources = sorted(
            _sources(run.scan("collectives", _FEWEST_SCANNED), self.clock, arrivals.cpp_waits(run)),
            key=lambda source: source.key,
        )
        self.is_in_order = len(self._sources) <= _MOST_OPEN and all(
            source.is_in_order for source in self._sources
        )
        self._progress = progress
        self._done, self._records = 0, run.health.records

    def reader(self) -> pa.RecordBatchReader:
        """Return a reader of all spans."""
        return pa.RecordBatchReader.from_batches(SPANS, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        rows = min(_MOST_ROWS, _ROWS_AT_ONCE // max(1, len(self._sources)))
        streams = [self._spans(source, rows) for source in self._sources]
        try:
            for table in in_time_order(streams) if self.is_in_order else chain.from_iterable(streams):
                self._done += len(table)
                self._progress(self._done, max(self._records, self._done))
                yield from table.to_batches()
        except TraceError as error:
            self.failure = error
            raise

    def _spans(self, source: _Source, most_rows: int) -> Iterator[pa.Table]:
        first = 0
        for rows in source.rows(most_rows):
            mine = slice(first, first + len(rows))
            part_spans = spans(rows, self.clock)
            self.unknown_clocks += part_spans.unknown_clocks
            table = with_spans(rows, part_spans, source.own.of(mine), self.kinds)
            for begin in range(0, len(table), _ROWS_IN_ORDER):
                yield table.slice(begin, _ROWS_IN_ORDER)
            first += len(rows)


def in_time_order(streams: Sequence[Iterator[pa.Table]]) -> Iterator[pa.Table]:
    """Merge ``streams``, which must be sorted by begin_ns. Rows with equal begin_ns keep the order of the streams."""
    open_streams = dict(enumerate(streams))
    unread_rows: dict[int, pa.Table] = {}

    def pull(number: int) -> None:
        more = next((rows for rows in open_streams[number] if len(rows)), None)
        if more is None:
            del open_streams[number]
        else:
            unread_rows[number] = (
                pa.concat_tables([unread_rows[number], more]).combine_chunks()
                if number in unread_rows
                else more
            )

    for number in list(open_streams):
        pull(number)
    while open_streams:
        last = {number: unread_rows[number]["begin_ns"][-1].as_py() for number in open_streams}
        slowest = min(last, key=lambda number: last[number])
        ready = []  # rows that begin before all rows that are not read yet
        for number, rows in sorted(unread_rows.items()):
            count = int(np.searchsorted(rows["begin_ns"].to_numpy(), last[slowest]))
            ready.append(rows.slice(0, count))
            unread_rows[number] = rows.slice(count)
        yield _sorted(ready)
        pull(slowest)
    yield _sorted([rows for _, rows in sorted(unread_rows.items())])


def _sorted(tables: Sequence[pa.Table]) -> pa.Table:
    rows = pa.concat_tables([SPANS.empty_table(), *tables]).combine_chunks()
    return rows.take(pa.array(np.argsort(rows["begin_ns"].to_numpy(), kind="stable")))


def _sources(
    collectives: pa.Table | Scan, clock: ReferenceClock | None, waits: CppWaits | None
) -> Iterator[_Source]:
    if not isinstance(collectives, Scan):
        yield _of_table(collectives, waits)
        return
    for file in collectives.files:
        yield _of_file(file, clock, waits)
    if len(collectives.rest):
        yield _of_table(collectives.rest, waits)


def _of_table(rows: pa.Table, waits: CppWaits | None) -> _Source:
    rows = _beside(rows, waits)
    return _Source(own(rows), (), False, lambda _: iter([rows]))


def _beside(records: pa.Table, waits: CppWaits | None) -> pa.Table:
    return records if waits is None else waits.beside(records)


def _of_file(file: Path, clock: ReferenceClock | None, waits: CppWaits | None) -> _Source:
    needed = dict.fromkeys((*TIME_COLUMNS, *(cpp_waits.SOURCES if waits else ())))
    times = _beside(read_columns(file, tuple(needed)), waits)
    begin = begins(times, clock)
    key = tuple(int(times[name][0].as_py()) if len(times) else 0 for name in ORDER[1:])
    is_one = all(_is_constant(times[name].to_numpy()) for name in ORDER[1:-1])
    in_order = is_one and _is_in_order(begin, times["seq"].to_numpy())

    def rows(most_rows: int) -> Iterator[pa.Table]:
        parts = column_parts(file, "collectives", COLLECTIVES.names, most_rows)
        return (_beside(part, waits) for part in parts)

    return _Source(own(times), key, in_order, rows)


def _is_constant(values: npt.NDArray[np.int32]) -> bool:
    return not len(values) or bool(values.min() == values.max())


def _is_in_order(begin: npt.NDArray[np.int64], seq: npt.NDArray[np.int64]) -> bool:
    later = begin[1:] > begin[:-1]
    return bool((later | ((begin[1:] == begin[:-1]) & (seq[1:] > seq[:-1]))).all())


def _clock(run: Run) -> ReferenceClock | None:
    """Return the clock of the run, or None if all processes share one clock and no time needs an offset."""
    clock = ReferenceClock(
        run.table("clocks").to_pylist(),
        run.table("clock_offsets").to_pylist(),
        one_host=len(run.manifest.hosts) < 2,
    )
    processes = {(entry["rank"], entry["attempt"], entry["pid"]) for entry in run.manifest.ranks}
    return None if len({clock.clock_of(process) for process in processes}) < 2 else clock
