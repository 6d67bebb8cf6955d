"""Records sums per step instead of each collective: for jobs of weeks, and beyond a size limit.

The interception packs records as usual, but into memory. A step later, when their calls have returned and their waits have
ended, they are summed by step, phase, operation, group and purpose. The sums of a step become one line of the events file.
So the files do not grow with the number of collectives, and a killed process loses the sums of its last two steps.
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
# A program that marks no steps has its records added up once so many segments are full.
_MOST_WAITING: Final = 4
# ... and its sums written this often.
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

# Of the calls of one signature and tag, in one phase of one step: how many, time in them, time that the program stood still
# for them as measured and of how many, time in their waits and of how many, and whether they are asynchronous; then of
# those whose bytes are not the signature's: how many, and their bytes of input and of output.
_Sums = list[int]


class Aggregation:
    """Provides segments in memory instead of a file's, and sums the records packed there.

    Args:
        journal: where the lines go, and which knows the interned values by their numbers.
        from_the_start: keep no record; else as many as ``limit`` allows.
        limit: what the files may hold.
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
        self._fresh: deque[Segment] = deque()  # full ones of this step
        self._aged: deque[Segment] = deque()  # of the step before
        self._sums: dict[tuple[int, int, int, int], _Sums] = {}
        self._next_write_ns = time.perf_counter_ns() + _WRITE_INTERVAL_NS

    def allows_records(self, size: int) -> bool:
        """Whether the records file may grow to ``size`` bytes."""
        return not self._from_the_start and self._limit.allows_records(size)

    def next_segment(self) -> Segment:
        """Return room for the next records. Earlier ones are summed later: they may still be completed."""
        with self._lock:
            if not self._from_the_start:
                self._limit.begin_sums()
            if self._open is not None:
                if not self._open.used:
                    return self._open
                self._fresh.append(self._open)
            # New memory each time: code that still holds a place in the old memory completes its own record there.
            self._open = Segment(mmap.mmap(-1, _SEGMENT_BYTES), _SEGMENT_BYTES)
            if len(self._fresh) + len(self._aged) > _MOST_WAITING:
                self._fold(self._aged.popleft() if self._aged else self._fresh.popleft())
                if time.perf_counter_ns() > self._next_write_ns:
                    self._write()
            return self._open

    def end_step(self) -> None:
        """A step has ended, and the next has a segment of its own: add up the one before, and write its sums."""
        with self._lock:
            aged, self._aged, self._fresh = self._aged, self._fresh, deque()
            for segment in aged:
                self._fold(segment)
            self._write()

    def finish(self) -> None:
        """Recording ends: add up and write everything."""
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
                # A synchronous call blocks the program all the time.
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
        """The sums of one step as rows of ``SUM_FIELDS``: many signatures and tags share operation, purpose and group."""
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
            # What the host waits says nothing of a device.
            on_cpu = signature.get("device") in _OF_THE_CPU
            exposed = measured_ns + (waited_ns if on_cpu else 0)
            added = (
                calls,
                *(
                    (calls - others) * signature.get(name, 0) + more
                    for name, more in (
                        ("payload_bytes", sent),  # of an all_to_all its whole input
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
