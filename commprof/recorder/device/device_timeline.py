"""Times the collectives of one device with events, without waiting for any of them.

Note [which events]: a synchronous operation of NCCL runs on the current stream. So an event before the call and
an event after the call enclose the operation. An asynchronous operation runs on a stream of the group, in which
commprof records no event. An event before the call gives the earliest begin of the operation. An event before
``Work.wait()`` and an event after it give the time in which the program's stream was blocked on the operation.

Note [side streams]: an operation on a stream other than the default stream (FSDP2, a runtime that overlaps)
does not block the program. The program is blocked while the default stream waits for events of the side stream.
An event before and an event after each such wait (:class:`Wait`) give the length of the wait. The first wait
that ends after the operation may have been a wait for this operation. The exposed time of the operation is the
time that the operation and this wait have in common.

Note [C++ waits]: DDP's reducer issues its buckets and waits for them in C++. An event before the first and an
event after the last of these waits enclose the waits, and also the copies in between. So these events give
bounds of the exposed time, but not the end of any bucket.

This module never waits for an event. It only queries events.
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

MOST_OPEN: Final = 4096  # maximum number of unresolved operations, waits and anchors of one device
ASK_NS: Final = 100_000  # host time between two queries of the oldest event
BATCH: Final = 64  # number of completed operations whose times are read together
# Maximum number of waits of the default stream whose times are kept for operations that are resolved later.
MOST_WAITS: Final = 512
MOST_ISSUED_IN_CPP: Final = 1024  # operations of one device that C++ issued and did not wait for yet
# Rounding error between the times of two streams that are relative to different anchors.
ROUNDING_NS: Final = 2_000
# One pass stops after this number of events that the device has not reached, because each query costs 1 us.
MOST_UNREACHED: Final = 8
# A new anchor is set after this number of operations or this time, even if no step has ended. The reason is that
# the time since the anchor is measured in single precision.
ANCHOR_OPERATIONS: Final = 512
ANCHOR_NS: Final = 1_000_000_000


@dataclass(slots=True)
class Tally:
    """The state that all timelines of a recording share: record clock, fault handler and counts of operations."""

    clock: Callable[[], int]
    on_fault: Callable[[BaseException], None]
    timed: int = 0
    cpp_waits: int = 0
    captured: int = 0  # operations not timed because a graph was being captured
    given_up: int = 0  # operations not timed because too many were in progress


class Anchor:
    """An event that later events are timed relative to.

    The time of the anchor is known once the device has reached the anchor.
    """

    __slots__ = ("device_ns", "event", "found_reached", "host_ns", "not_before", "previous")

    def __init__(self, event: Event, host_ns: int, previous: Anchor | None) -> None:
        self.event = event
        self.host_ns = host_ns  # read just before the event was created
        self.not_before = host_ns
        self.found_reached = 0
        self.previous = previous
        self.device_ns: float | None = None

    @property
    def last(self) -> Event:
        """The event that the device must reach before this can be resolved."""
        return self.event

    def place(self) -> float:
        """Compute the device time of this anchor, in nanoseconds since the first anchor of the device."""
        if self.previous is None:
            self.device_ns = 0.0
        else:
            assert self.previous.device_ns is not None
            self.device_ns = self.previous.device_ns + _ns(self.previous.event, self.event)
            self.previous = None
        return self.device_ns


class Wait:
    """A wait of the program's stream for other streams, enclosed by two events.

    Args:
        anchor: The anchor to which the times of the events are relative.
        begin_event: The event before the wait.
        not_before: A host time in nanoseconds at which the device had not yet reached the last event.
        operations: The operations that C++ waited for in this wait.
        on_times: A function that is called with the begin and the end of the wait, in nanoseconds of the host's
            clock.

    Attributes:
        number: The position of the wait among the operations and waits of the device, in the order of the
            host's calls.
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
        """The event that the device must reach before this can be resolved."""
        assert self.end_event is not None
        return self.end_event


class _Span(NamedTuple):
    """The begin and end of an operation or wait in device time, and its position in the order of the host's calls."""

    number: int
    begin_ns: float
    end_ns: float


class Operation(Segment):
    """One collective of a device: the position of its record, and the events around the collective.

    An operation replaces the segment of its record. Code that writes the return time or a wait time of the call
    into the operation therefore also creates the events. Writing never raises.

    Args:
        target: The segment of the record.
        base: The index of the first word of the record in ``target``.
        is_async: Whether the call is asynchronous.
        issued_in_cpp: Whether C++ issued the call, so that no wait of a recorded method for it is seen.

    Attributes:
        timeline: The timeline that creates the events. If it is None, no events are created, and the operation
            only passes words on to ``target``.
        anchor, begin_event, not_before: Set by :meth:`Timeline.begin`.
        is_aside, number: Set when the last event is created.
        found_reached: The host time in nanoseconds at which the last event was found reached.
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
        # Segment.__init__ is not called, because an operation has no slots and is created for every call.
        self.target = target
        self.base = base
        self.is_async = is_async
        self.issued_in_cpp = issued_in_cpp
        self.timeline: Timeline | None = None
        self.wait_event: Event | None = None
        self.end_event: Event | None = None

    @property
    def words(self) -> Words:  # type: ignore[override]
        """The object into which times are written: this operation."""
        return self

    @property
    def last(self) -> Event:
        """The event that the device must reach before this can be resolved."""
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
    """The operations, waits and anchors of one device, in the order in which their last events were created."""

    def __init__(self, tally: Tally, pool: EventPool) -> None:
        self.tally = tally
        self.pool = pool
        self.clock = DeviceClock()
        self.anchor: Anchor | None = None
        self.has_aside = False
        self._open: deque[Anchor | Operation | Wait] = deque()
        self._reached: list[Anchor | Operation | Wait] = []  # reached, but their times are not read yet
        self._made = 0
        self._waits: deque[_Span] = deque(maxlen=MOST_WAITS)  # in the order of the host's calls
        # Operations on side streams for which no wait of the default stream is known.
        self._aside: deque[tuple[Operation, _Span]] = deque(maxlen=MOST_OPEN)
        self._lost_aside = 0
        self._issued_in_cpp: deque[Operation] = deque(maxlen=MOST_ISSUED_IN_CPP)
        self._since_anchor = 0
        self._asked_ns = 0
        self._resolving = threading.Lock()

    @property
    def unresolved(self) -> int:
        """The number of operations whose times are not known yet."""
        return sum(isinstance(item, Operation) for item in [*self._open, *self._reached])

    @property
    def unknown_aside(self) -> int:
        """The number of operations on side streams for which no wait of the default stream is known."""
        return len(self._aside) + self._lost_aside

    def begin(self, operation: Operation) -> None:
        """Record the event before the call of ``operation``.

        Also queries the oldest events, unless they were queried within the last ``ASK_NS``.
        """
        now = self.tally.clock()
        operation.anchor = self._anchor_at(now)
        operation.not_before = now
        operation.begin_event = self.pool.mark()
        operation.timeline = self
        if now - self._asked_ns > ASK_NS:
            self._asked_ns = now
            self._look()

    def _anchor_at(self, now: int) -> Anchor:
        """Return the anchor for an event that is created at the host time ``now``; set a new anchor if needed."""
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
        """Record the event before a wait of the program's stream for other streams.

        Args:
            stream: The stream that waits; None for the current stream.
            in_cpp: Whether C++ waits for the operations that it has issued so far.
            on_times: See :class:`Wait`.

        Returns:
            The wait; None if it is not timed.
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
        """Stop timing the operations that C++ has issued so far, because no wait for them can be observed."""
        issued = self._issued_in_cpp
        while issued:
            operation = issued.popleft()
            operation.timeline = None

    def end_wait(self, wait: Wait, stream: Any = None) -> None:
        """Record the event after ``wait``."""
        wait.end_event = self.pool.mark(stream)
        for operation in wait.operations:
            operation.timeline = None
        self._made += 1
        wait.number = self._made
        self._open.append(wait)

    def set_anchor(self) -> Anchor:
        """Record a new anchor, to which the times of later events are relative."""
        host_ns = self.tally.clock()
        self.anchor = anchor = Anchor(self.pool.mark(), host_ns, self.anchor)
        self._since_anchor = 0
        self._open.append(anchor)
        return anchor

    def end_step(self) -> None:
        """Resolve the completed events at the end of a step.

        Sets a new anchor if any event is relative to the current one.
        """
        self.resolve()
        if self._since_anchor and self.has_room and not self.pool.source.is_capturing():
            self.set_anchor()

    def follow(self, operation: Operation, word: int) -> None:
        """Record the event that is due after ``word`` of the record of ``operation`` was written.

        An event is due if the word is the time at which the call returned, or at which a wait for the operation
        began or ended. No event is recorded for other words.
        """
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
                # With some backends, the stream waits only in Work.wait(). So the later event is the end.
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
        """Return whether a graph is being captured. If so, ``operation`` is no longer timed."""
        if not self.pool.source.is_capturing():
            return False
        operation.timeline = None
        self.tally.captured += 1
        return True

    def _move_end(self, operation: Operation) -> None:
        # Another thread that resolves events may be reading this event.
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
        """Whether another operation can be timed."""
        return len(self._open) + len(self._reached) < MOST_OPEN

    def _look(self) -> None:
        """Query the oldest events. The times of reached events are read later, one batch at a time.

        Frequent queries give tight bounds of the clock offset, and a query is cheap. To read the time of an
        event is expensive.
        """
        if not self._resolving.acquire(blocking=False):
            return  # another thread is resolving events
        try:
            self._ask(1, BATCH)
            if len(self._reached) >= BATCH:
                self._read_times()
        finally:
            self._resolving.release()

    def resolve(self, most_unreached: int = MOST_UNREACHED) -> None:
        """Write the times of the operations whose events the device has reached. Does not wait for any event."""
        if not self._resolving.acquire(blocking=False):
            return  # another thread is resolving events
        try:
            if not self.pool.source.is_capturing():
                self._ask(most_unreached, MOST_OPEN)
                self._read_times()
        finally:
            self._resolving.release()

    def _ask(self, most_unreached: int, most: int) -> None:
        """Move reached items out of the queue, and note for each the host time at which it was found reached.

        Args:
            most_unreached: The number of unreached events after which the pass stops.
            most: The maximum number of queries.
        """
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
            # Items after an anchor need its time. Waits are all on one stream and must be read in order.
            if len(ahead) >= most_unreached or not isinstance(item, Operation):
                break
        if ahead is not None:
            waiting.extendleft(reversed(ahead))

    def _read_times(self) -> None:
        """Compute the times of the reached items, and write the times into the records."""
        reached, self._reached = self._reached, []
        timed: list[tuple[Operation | Wait, float, float]] = []
        clock = self.clock
        for item in reached:
            if isinstance(item, Anchor):
                device_ns = item.place()
            else:
                anchor, end = item.anchor, item.end_event
                assert anchor is not None and end is not None
                if anchor.device_ns is None:  # its stream is ahead of the anchor's stream
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
            _write_word(operation, EXPOSED_WORD, max(1, exposed))  # at least 1, because 0 means unknown
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
        """Write the exposed time of each operation on a side stream whose wait of the default stream is known."""
        waits = self._waits
        unmatched: list[tuple[Operation, _Span]] = []
        forgotten = waits[0].number if len(waits) == waits.maxlen else 0  # earlier waits were dropped
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
    # After the recording has ended, the memory of the record is no longer mapped.
    with contextlib.suppress(ValueError):
        operation.target.words[operation.base + word] = round(value)


def _ns(begin: Event, end: Any) -> float:
    """Return the nanoseconds from ``begin`` to ``end`` on the device."""
    return begin.elapsed_time(end) * 1e6
