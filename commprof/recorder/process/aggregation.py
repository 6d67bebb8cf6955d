"""Records sums per step instead of single collectives, for jobs that run for weeks, and beyond a size limit.

The interception packs records as usual, but into memory. The records are summed one step later, when their calls have
returned and their waits have ended. The sums are by step, phase, operation, group and purpose, and the sums of a step
become one line of the events file. The files therefore do not grow with the number of collectives. A killed process
loses the sums of its last two steps.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from commprof.recorder.process.bounds import SizeLimit
from commprof.recorder.process.journal import Journal
from commprof.schema import COMMIT, PHASES, RECORD, RECORD_FIELDS, STATUSES, Status
from commprof.trace.rank_files.segments import Segment
from commprof.trace.rank_files.writer import SEGMENT_UNIT

_SEGMENT_BYTES: Final = -(-(256 << 10) // SEGMENT_UNIT) * SEGMENT_UNIT
# If a program marks no steps, its records are summed when this number of segments is full.
_MOST_WAITING: Final = 4
# If a program marks no steps, its sums are written at this interval.
_WRITE_INTERVAL_NS: Final = 60_000_000_000
_RAISED: Final = STATUSES.index(Status.RAISED)
_POSITIONS: Final = {field.name: number for number, field in enumerate(RECORD_FIELDS)}
_ISSUE, _RETURN, _WAIT_BEGIN, _WAIT_END, _EXPOSED = (
    _POSITIONS[f"{name}_ns"] for name in ("issue", "return", "wait_begin", "wait_end", "exposed")
)
_SIGNATURE, _TAG, _STEP, _PHASE, _STATUS, _COMMIT = (
    _POSITIONS[name] for name in ("signature", "tag", "step", "phase", "status", "commit")
)

_OF_THE_CPU: Final = (None, "cpu")

# The sums over the calls of one signature and tag in one phase of one step: the number of calls, the time in the calls,
# the measured exposed time and the number of calls with such a time, the time in waits and the number of calls with
# such a time, and whether the calls are asynchronous. The last three values are about the calls whose bytes are not in
# the signature: their number, their input bytes and their output bytes.
_Sums = list[int]


class Aggregation:
    """Provides segments in memory instead of segments of a file, and sums the records in them.

    Args:
        journal: The journal, which receives the lines and provides the interned values by their numbers.
        from_the_start: Whether to write no record at all. Otherwise, records are written as far as ``limit`` allows.
        limit: The size limit of the files.
    """

    def __init__(self, journal: Journal, from_the_start: bool, limit: SizeLimit) -> None:
        self.lost = 0  # collectives in sums that could not be written
        self.cost_ns = 0
        self._journal = journal
        self._from_the_start = from_the_start
        self._limit = limit
        self._rows: dict[int, Mapping[str, Any]] = {}
        journal.rows = self._rows
        self._once = journal.once = {}
        self._lock = threading.RLock()
        self._open: Segment | None = None
        self._fresh: deque[Segment] = deque()  # full segments of the current step
        self._aged: deque[Segment] = deque()  # segments of the previous step
        self._sums: dict[tuple[int, int, int, int], _Sums] = {}
        self._next_write_ns = time.perf_counter_ns() + _WRITE_INTERVAL_NS

    def allows_records(self, size: int) -> bool:
        """Return whether the records file may grow to ``size`` bytes."""
        return not self._from_the_start and self._limit.allows_records(size)

    def next_segment(self) -> Segment:
        """Return a segment for the next records. Earlier records are summed later, because they may be incomplete."""
        with self._lock:
            if not self._from_the_start:
                self._limit.begin_sums()
            if self._open is not None:
                if not self._open.used:
                    return self._open
                self._fresh.append(self._open)
            # New memory is used each time, because calls in progress still complete their records in the old memory.
            self._open = Segment(mmap.mmap(-1, _SEGMENT_BYTES), _SEGMENT_BYTES)
            if len(self._fresh) + len(self._aged) > _MOST_WAITING:
                self._fold(self._aged.popleft() if self._aged else self._fresh.popleft())
                if time.perf_counter_ns() > self._next_write_ns:
                    self._write()
            return self._open

    def end_step(self) -> None:
        """Sum the segments of the step before the one that has ended, and write the sums.

        The segments of the ended step are summed one step later. The next step already uses a new segment.
        """
        with self._lock:
            aged, self._aged, self._fresh = self._aged, self._fresh, deque()
            for segment in aged:
                self._fold(segment)
            self._write()

    def finish(self) -> None:
        """Sum all segments and write all sums when recording ends."""
        with self._lock:
            waiting = [*self._aged, *self._fresh, *([] if self._open is None else [self._open])]
            self._aged, self._fresh, self._open = deque(), deque(), None
            for segment in waiting:
                self._fold(segment)
            self._write()

    def _fold(self, segment: Segment) -> None:
        begin = time.perf_counter_ns()
        if segment.map is not None:
            with memoryview(segment.map)[: segment.used] as packed:
                self._add_up(RECORD.iter_unpack(packed))
        self.cost_ns += time.perf_counter_ns() - begin

    def _add_up(self, records: Iterable[tuple[int, ...]]) -> None:
        sums = self._sums
        for record in records:
            once = self._once.pop(record[_SIGNATURE], None) if self._once else None
            if record[_COMMIT] != COMMIT or record[_STATUS] == _RAISED:
                continue
            signature = record[_SIGNATURE] if once is None else once.like
            key = (record[_STEP], record[_PHASE], signature, record[_TAG])
            of_key = sums.get(key)
            if of_key is None:
                is_async = self._rows.get(signature, {}).get("is_async", True)
                of_key = sums[key] = [0, 0, 0, 0, 0, 0, is_async, 0, 0, 0]
            of_key[0] += 1
            if once is not None:
                of_key[7] += 1
                of_key[8] += once.input_bytes
                of_key[9] += once.output_bytes
            returned, wait_end = record[_RETURN], record[_WAIT_END]
            if returned:
                of_key[1] += returned - record[_ISSUE]
            if record[_EXPOSED]:
                of_key[2] += record[_EXPOSED]
                of_key[3] += 1
            elif wait_end:
                # A synchronous call blocks the program from the issue to the end of the wait.
                of_key[4] += wait_end - (record[_WAIT_BEGIN] if of_key[6] else record[_ISSUE])
                of_key[5] += 1

    def _write(self) -> None:
        begin = time.perf_counter_ns()
        self._next_write_ns = begin + _WRITE_INTERVAL_NS
        sums, self._sums = self._sums, {}
        for step in sorted({key[0] for key in sums}):
            of_step = {key[1:]: values for key, values in sums.items() if key[0] == step}
            lines = self._combine(of_step)
            calls = sum(values[0] for values in of_step.values())
            if not self._journal.write("aggregate", {"step": step, "sums": lines}):
                self.lost += calls
        self.cost_ns += time.perf_counter_ns() - begin

    def _combine(self, sums: Mapping[tuple[int, int, int], _Sums]) -> list[list[Any]]:
        """Return the sums of one step as rows of ``SUM_FIELDS``.

        Many signatures and tags have the same operation, purpose and group, so their sums are combined.
        """
        combined: dict[tuple[Any, ...], list[int | None]] = {}
        for (phase, signature_number, tag_number), values in sums.items():
            calls, host_ns, measured_ns, measured, waited_ns, waited, _, others, sent, received = values
            signature, tag = self._rows.get(signature_number, {}), self._rows.get(tag_number, {})
            key = (
                PHASES[phase],
                signature.get("op"),
                tag.get("intended_op"),
                tag.get("purpose"),
                signature.get("pg"),
                signature.get("is_p2p"),
            )
            into = combined.setdefault(key, [0, 0, 0, 0, 0, None])
            # The waiting time of the host is not the waiting time of a device.
            on_cpu = signature.get("device") in _OF_THE_CPU
            exposed = measured_ns + (waited_ns if on_cpu else 0)
            added = (
                calls,
                *(
                    (calls - others) * signature.get(name, 0) + more
                    for name, more in (
                        ("payload_bytes", sent),  # the payload of an all_to_all is its whole input
                        ("input_bytes", sent),
                        ("output_bytes", received),
                    )
                ),
                host_ns,
                exposed if measured or (waited and on_cpu) else None,
            )
            for place, value in enumerate(added):
                if value is not None:
                    into[place] = (into[place] or 0) + value
        return [[*key, *values] for key, values in combined.items()]
