"""Times the collectives of one device with events, without waiting for any of them.

Note [which events]: a synchronous operation of NCCL runs on the current stream, so an event before and one after the call
enclose it. An asynchronous one runs on a stream of the group, which gets no event of ours. One event before the call gives
its earliest begin. One before and one after ``Work.wait()`` give the time that the program's stream was blocked on it.

Note [side streams]: an operation on a stream other than the default one (FSDP2, a runtime that overlaps) does not block the
program. The default stream does when it waits for that stream's events, so one event before and one after each such wait
(:class:`Wait`) show for how long. The first wait that ends after the operation is the one that may have been for it. The
time that both share is the operation's exposed time.

Note [C++ waits]: DDP's reducer issues its buckets and waits for them in C++. One event before and one after all of its waits
enclose them, and whatever it copies in between. So these give bounds of the exposed time, and no end of a bucket.

Nothing ever waits: events are only queried.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from commprof.recorder.device.device_clock import DeviceClock
from commprof.recorder.device.device_events import Event, EventPool
from commprof.trace.rank_files.segments import (
    DEVICE_BEGIN_WORD,
    DEVICE_END_WORD,
    EXPOSED_WORD,
    RETURN_WORD,
    WAIT_BEGIN_WORD,
    WAIT_END_WORD,
    Segment,
    Words,
)

MOST_OPEN: Final = 4096  # operations of one device whose events the device has not reached yet, at most
ASK_NS: Final = 100_000  # of the host, between two questions whether the oldest was reached
BATCH: Final = 64  # operations that were reached and whose times are read together
# Waits of the default stream whose times are kept for operations that are resolved later.
MOST_WAITS: Final = 512
MOST_ISSUED_IN_CPP: Final = 1024  # operations of one device that C++ issued and did not wait for yet
ROUNDING_NS: Final = 2_000  # of the times of two streams that are counted from different anchors
MOST_UNREACHED: Final = 8  # events found unreached, after which one pass gives up: each question costs 1 us
# There is a new anchor after so many operations or so much time, even if no step has ended: the distance to it is given in
# single precision.
ANCHOR_OPERATIONS: Final = 512
ANCHOR_NS: Final = 1_000_000_000


@dataclass(slots=True)
class Tally:
    """Shared by all timelines of a recording: the clock of the records, the fault handler, counts of operations."""

    clock: Callable[[], int]
    on_fault: Callable[[BaseException], None]
    timed: int = 0
    cpp_waits: int = 0
    captured: int = 0  # not timed, since a graph was captured
    given_up: int = 0  # not timed, since too many were under way


class Anchor:
    """An event that the times of later ones are counted from. Its own time is known once the device has reached it."""

    __slots__ = ("device_ns", "event", "found_reached", "host_ns", "not_before", "previous")

    def __init__(self, event: Event, host_ns: int, previous: Anchor | None) -> None:
        self.event = event
        self.host_ns = host_ns  # read just before the event was made
        self.not_before = host_ns
        self.found_reached = 0
        self.previous = previous
        self.device_ns: float | None = None

    @property
    def last(self) -> Event:
        """What must be reached before this can be resolved."""
        return self.event

    def place(self) -> float:
        """Its time on the device, on an axis that begins at the device's first anchor."""
        if self.previous is None:
            self.device_ns = 0.0
        else:
            assert self.previous.device_ns is not None
            self.device_ns = self.previous.device_ns + _ns(self.previous.event, self.event)
            self.previous = None
        return self.device_ns


class Wait:
    """A wait of the program's stream for other streams, between two events.

    Args:
        number: its place among the operations and waits of the device, as the host made them.
        operations: those that C++ waited for in it.
        on_times: given its begin and end on the host's clock, in nanoseconds.
    """

    __slots__ = (
        "anchor",
        "begin_event",
        "end_event",
        "found_reached",
        "not_before",
        "number",
        "on_times",
        "operations",
    )

    def __init__(
        self,
        anchor: Anchor,
        begin_event: Event,
        not_before: int,
        operations: Sequence[Operation] = (),
        on_times: Callable[[int, int], None] | None = None,
    ) -> None:
        self.anchor = anchor
        self.begin_event = begin_event
        self.not_before = not_before
        self.operations = operations
        self.on_times = on_times
        self.end_event: Event | None = None
        self.found_reached = 0
        self.number = 0

    @property
    def last(self) -> Event:
        """What must be reached before this can be resolved."""
        assert self.end_event is not None
        return self.end_event


class _Span(NamedTuple):
    """Begin and end on the device's axis, and the place in the order in which the host made it."""

    number: int
    begin_ns: float
    end_ns: float


class Operation(Segment):
    """One collective of a device: where its record is, and the events around it.

    It stands in the place of the record's segment, so that whoever writes down when the call returned and when it was waited
    for makes the events by the same stroke. Writing never raises.

    Args:
        target: the record's segment.
        base: the index of the record's first word there.

    Attributes:
        timeline: what makes the events; None: none are made, then this is nothing but the words.
        anchor, begin_event, not_before: set by :meth:`Timeline.begin`.
        is_aside, number, found_reached: set when its last event is made, and when that is found reached.
        issued_in_cpp: C++ issued it, and nobody sees it wait.
    """

    anchor: Anchor
    begin_event: Event
    found_reached: int
    is_aside: bool
    not_before: int
    number: int
    __slots__ = (
        "anchor",
        "base",
        "begin_event",
        "end_event",
        "found_reached",
        "is_aside",
        "is_async",
        "issued_in_cpp",
        "not_before",
        "number",
        "target",
        "timeline",
        "wait_event",
    )

    def __init__(self, target: Segment, base: int, is_async: bool, issued_in_cpp: bool = False) -> None:
        # Not that of Segment: it has no room for records, and one is made for every call.
        self.target = target
        self.base = base
        self.is_async = is_async
        self.issued_in_cpp = issued_in_cpp
        self.timeline: Timeline | None = None
        self.wait_event: Event | None = None
        self.end_event: Event | None = None

    @property
    def words(self) -> Words:  # type: ignore[override]
        """What a time is written into."""
        return self

    @property
    def last(self) -> Event:
        """What must be reached before this can be resolved."""
        assert self.end_event is not None
        return self.end_event

    def __getitem__(self, index: int) -> int:
        return self.target.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        timeline = self.timeline
        try:
            self.target.words[index] = value
            if timeline is not None:
                timeline.follow(self, index - self.base)
        except Exception as error:
            self.timeline = None
            if timeline is not None:
                timeline.tally.on_fault(error)


class Timeline:
    """The operations and anchors of one device, in the order in which their last events were made."""

    def __init__(self, tally: Tally, pool: EventPool) -> None:
        self.tally = tally
        self.pool = pool
        self.clock = DeviceClock()
        self.anchor: Anchor | None = None
        self.has_aside = False
        self._open: deque[Anchor | Operation | Wait] = deque()
        self._reached: list[Anchor | Operation | Wait] = []  # of these the times are not read yet
        self._made = 0
        self._waits: deque[_Span] = deque(maxlen=MOST_WAITS)  # in the order in which they were made
        # Operations on side streams for which no wait of the default stream is known.
        self._aside: deque[tuple[Operation, _Span]] = deque(maxlen=MOST_OPEN)
        self._lost_aside = 0
        self._issued_in_cpp: deque[Operation] = deque(maxlen=MOST_ISSUED_IN_CPP)
        self._since_anchor = 0
        self._asked_ns = 0
        self._resolving = threading.Lock()

    @property
    def unresolved(self) -> int:
        """Operations whose times are not known yet."""
        return sum(isinstance(item, Operation) for item in [*self._open, *self._reached])

    @property
    def unknown_aside(self) -> int:
        """Operations on side streams for which no wait of the default stream is known."""
        return len(self._aside) + self._lost_aside

    def begin(self, operation: Operation) -> None:
        """The call of ``operation`` is about to be made. Looks after the oldest as well, if that was not done just now."""
        now = self.tally.clock()
        operation.anchor = self._anchor_at(now)
        operation.not_before = now
        operation.begin_event = self.pool.mark()
        operation.timeline = self
        if now - self._asked_ns > ASK_NS:
            self._asked_ns = now
            self._look()

    def _anchor_at(self, now: int) -> Anchor:
        """What the times of an event that is made ``now`` are counted from."""
        anchor = self.anchor
        if anchor is None or self._since_anchor >= ANCHOR_OPERATIONS or now - anchor.host_ns > ANCHOR_NS:
            anchor = self.set_anchor()
        self._since_anchor += 1
        return anchor

    def begin_wait(
        self,
        stream: Any = None,
        in_cpp: bool = False,
        on_times: Callable[[int, int], None] | None = None,
    ) -> Wait | None:
        """The program's stream is about to wait for others; None: it is not timed.

        Args:
            stream: the one that waits, if not the current one.
            in_cpp: for what C++ has issued until now.
            on_times: see :class:`Wait`.
        """
        operations: list[Operation] = []
        if in_cpp:
            while self._issued_in_cpp:
                operation = self._issued_in_cpp.popleft()
                if operation.timeline is self and operation.wait_event is None:
                    operations.append(operation)
            if not operations:
                return None
        if not self.has_room or self.pool.source.is_capturing():
            return None
        now = self.tally.clock()
        return Wait(self._anchor_at(now), self.pool.mark(stream), now, operations, on_times)

    def forget_cpp(self) -> None:
        """Nothing shows when the program waits for what C++ has issued until now."""
        issued = self._issued_in_cpp
        while issued:
            operation = issued.popleft()
            operation.timeline = None

    def end_wait(self, wait: Wait, stream: Any = None) -> None:
        """The program's stream waits for nothing more of it."""
        wait.end_event = self.pool.mark(stream)
        for operation in wait.operations:
            operation.timeline = None
        self._made += 1
        wait.number = self._made
        self._open.append(wait)

    def set_anchor(self) -> Anchor:
        """Count the times of what follows from here."""
        host_ns = self.tally.clock()
        self.anchor = anchor = Anchor(self.pool.mark(), host_ns, self.anchor)
        self._since_anchor = 0
        self._open.append(anchor)
        return anchor

    def end_step(self) -> None:
        """A step has ended: resolve what can be, and count from a new anchor if anything was counted from the last."""
        self.resolve()
        if self._since_anchor and self.has_room and not self.pool.source.is_capturing():
            self.set_anchor()

    def follow(self, operation: Operation, word: int) -> None:
        """``word`` of the record of ``operation`` was written: the call returned, or a wait for it began or ended."""
        if word == RETURN_WORD:
            ends = not operation.is_async
            if operation.is_async and operation.issued_in_cpp:
                self._issued_in_cpp.append(operation)
        elif word not in (WAIT_BEGIN_WORD, WAIT_END_WORD) or self._is_capturing(operation):
            return
        elif word == WAIT_BEGIN_WORD:
            if operation.is_async:
                operation.wait_event = self.pool.mark()
            return
        else:
            ends = operation.is_async and operation.wait_event is not None
            if not operation.is_async:
                # A backend that makes the stream wait in Work.wait() only. The later event counts.
                self._move_end(operation)
        if ends:
            pool = self.pool
            operation.is_aside = pool.source.is_aside(pool.index)
            self.has_aside = self.has_aside or operation.is_aside
            operation.end_event = pool.mark()
            self._made += 1
            operation.number = self._made
            self._open.append(operation)

    def _is_capturing(self, operation: Operation) -> bool:
        """Whether a graph is being captured by now: then ``operation`` is not timed."""
        if not self.pool.source.is_capturing():
            return False
        operation.timeline = None
        self.tally.captured += 1
        return True

    def _move_end(self, operation: Operation) -> None:
        # Not while another thread resolves: it may be reading the event.
        if not self._resolving.acquire(blocking=False):
            return
        try:
            if operation.end_event is not None and operation.timeline is not None:
                earlier, operation.end_event = operation.end_event, self.pool.mark()
                self.pool.give(earlier)
        finally:
            self._resolving.release()

    @property
    def has_room(self) -> bool:
        """Whether another operation may be followed."""
        return len(self._open) + len(self._reached) < MOST_OPEN

    def _look(self) -> None:
        """Note which of the oldest have been reached by now. Their times are read later, a batch at a time.

        Asking often bounds the difference of the clocks, and asking is cheap; reading the times of an event is not.
        """
        if not self._resolving.acquire(blocking=False):
            return  # another thread is at it
        try:
            self._ask(1, BATCH)
            if len(self._reached) >= BATCH:
                self._read_times()
        finally:
            self._resolving.release()

    def resolve(self, most_unreached: int = MOST_UNREACHED) -> None:
        """Write down the times of the operations whose events the device has reached. Does not wait for any."""
        if not self._resolving.acquire(blocking=False):
            return  # another thread is at it
        try:
            if not self.pool.source.is_capturing():
                self._ask(most_unreached, MOST_OPEN)
                self._read_times()
        finally:
            self._resolving.release()

    def _ask(self, most_unreached: int, most: int) -> None:
        """Take what was reached out of the queue, with when it was found so."""
        waiting, clock, ahead = self._open, self.tally.clock, None
        for _ in range(most):
            if not waiting:
                break
            item = waiting.popleft()
            asked = clock()
            if item.last.query():
                item.found_reached = clock()
                self._reached.append(item)
                continue
            item.not_before = asked
            if ahead is None:
                ahead = []
            ahead.append(item)
            # What follows an anchor is counted from it. Waits are of one stream, and are to be read in their order.
            if len(ahead) >= most_unreached or not isinstance(item, Operation):
                break
        if ahead is not None:
            waiting.extendleft(reversed(ahead))

    def _read_times(self) -> None:
        """Compute the times of what was reached, and write them down."""
        reached, self._reached = self._reached, []
        timed: list[tuple[Operation | Wait, float, float]] = []
        clock = self.clock
        for item in reached:
            if isinstance(item, Anchor):
                device_ns = item.place()
            else:
                anchor, end = item.anchor, item.end_event
                assert anchor is not None and end is not None
                if anchor.device_ns is None:  # another stream was faster than that of the anchor
                    self._open.appendleft(item)
                    continue
                device_ns = anchor.device_ns + _ns(anchor.event, end)
                timed.append((item, anchor.device_ns, device_ns))
            clock.reached_after(device_ns, item.not_before)
            clock.reached_before(device_ns, item.found_reached)
        offset = clock.offset(self.tally.clock())
        for item, anchor_ns, end_ns in timed:
            if isinstance(item, Wait):
                self._write_wait(item, anchor_ns, end_ns, offset)
            else:
                self._write(item, anchor_ns, end_ns, offset)
        if timed and self._aside:
            self._match_aside()

    def _write(self, operation: Operation, anchor_ns: float, end_ns: float, offset: float | None) -> None:
        anchor, begin, wait_begin, end = (
            operation.anchor,
            operation.begin_event,
            operation.wait_event,
            operation.end_event,
        )
        assert anchor is not None and begin is not None
        exposed = _ns(begin if wait_begin is None else wait_begin, end)
        begin_ns = end_ns - exposed if wait_begin is None else anchor_ns + _ns(anchor.event, begin)
        operation.timeline = None
        self.tally.timed += 1
        if offset is not None:
            _write_word(operation, DEVICE_BEGIN_WORD, begin_ns + offset)
            _write_word(operation, DEVICE_END_WORD, end_ns + offset)
        if operation.is_aside:
            if len(self._aside) == self._aside.maxlen:
                self._lost_aside += 1
            self._aside.append((operation, _Span(operation.number, begin_ns, end_ns)))
        else:
            _write_word(operation, EXPOSED_WORD, max(1, exposed))  # 0: it is not known
        self.pool.give(begin, wait_begin, end)

    def _write_wait(self, wait: Wait, anchor_ns: float, end_ns: float, offset: float | None) -> None:
        begin_ns = anchor_ns + _ns(wait.anchor.event, wait.begin_event)
        self._waits.append(_Span(wait.number, begin_ns, end_ns))
        for operation in wait.operations:
            anchor = operation.anchor
            if anchor.device_ns is not None and offset is not None:
                operation_begin = anchor.device_ns + _ns(anchor.event, operation.begin_event)
                _write_word(operation, DEVICE_BEGIN_WORD, operation_begin + offset)
            self.pool.give(operation.begin_event)
        if wait.on_times is not None and offset is not None:
            self.tally.cpp_waits += 1
            wait.on_times(round(begin_ns + offset), round(end_ns + offset))
        self.pool.give(wait.begin_event, wait.end_event)

    def _match_aside(self) -> None:
        """Write down the exposed time of operations on side streams that a wait of the default stream covers by now."""
        waits = self._waits
        unmatched: list[tuple[Operation, _Span]] = []
        forgotten = waits[0].number if len(waits) == waits.maxlen else 0  # what ended earlier is not known
        for operation, span in self._aside:
            if span.number < forgotten:
                self._lost_aside += 1
                continue
            first = None
            for wait in reversed(waits):
                if wait.number < span.number or wait.end_ns < span.end_ns - ROUNDING_NS:
                    break
                first = wait
            if first is None:
                unmatched.append((operation, span))
                continue
            shared = min(first.end_ns, span.end_ns) - max(first.begin_ns, span.begin_ns)
            _write_word(operation, EXPOSED_WORD, max(1, shared))
        self._aside = deque(unmatched, MOST_OPEN)


def _write_word(operation: Operation, word: int, value: float) -> None:
    # Of a recording that has ended, the record's memory is gone.
    with contextlib.suppress(ValueError):
        operation.target.words[operation.base + word] = round(value)


def _ns(begin: Event, end: Any) -> float:
    """Nanoseconds from ``begin`` to ``end`` on the device."""
    return begin.elapsed_time(end) * 1e6
