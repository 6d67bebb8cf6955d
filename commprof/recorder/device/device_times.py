"""Measures the exposed time of collectives on device streams: creates events, and converts their times to host times.

Events are resolved in batches at the ends of steps. No tensor or handle is kept for them. See
:mod:`commprof.recorder.device.device_timeline`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

from commprof.recorder.device import device_timeline
from commprof.recorder.device.device_events import DEFAULT_STREAM, CudaEvents, EventPool, EventSource
from commprof.recorder.device.device_timeline import Operation, Tally, Timeline, Wait
from commprof.trace.rank_files.segments import NO_WORDS, Segment

_MOST_SIGNATURES: Final = 200_000
_SOURCES: Final[dict[str, Callable[[], EventSource]]] = {"cuda": CudaEvents}


class DeviceTimes:
    """Times the collectives of accelerators, and converts the times to the host's clock.

    Args:
        enabled: Whether any events are created.
        on_fault: A function that is called with each exception of the timing code. The operation is then not timed.
        sources: For each type of device, a function that returns the source of its events.
        clock: The clock of the records, in nanoseconds.
    """

    def __init__(
        self,
        enabled: bool,
        on_fault: Callable[[BaseException], None],
        sources: dict[str, Callable[[], EventSource]] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.tally = Tally(clock, on_fault)
        self._enabled = enabled
        self._sources = _SOURCES if sources is None else sources
        self._timelines: dict[str, Timeline | None] = {}
        self._signatures: dict[int, tuple[Timeline | None, bool]] = {}

    def learn(self, signature: int, device: str, is_async: bool) -> None:
        """Register that calls with ``signature`` have tensors on ``device`` (for example ``cuda:0``)."""
        if device not in self._timelines:
            self._timelines[device] = self._new_timeline(device)
        if len(self._signatures) > _MOST_SIGNATURES:
            self._signatures.clear()
        self._signatures[signature] = (self._timelines[device], is_async)

    def _new_timeline(self, device: str) -> Timeline | None:
        kind, _, index = device.partition(":")
        source = self._sources.get(kind)
        if source is None or not self._enabled:
            return None
        return Timeline(self.tally, EventPool(source(), int(index or 0)))

    def follow(
        self, segment: Segment, base: int, signature: int, captured: bool, issued_in_cpp: bool = False
    ) -> Segment:
        """Return the object into which the times of the next call are written.

        The object is ``segment`` if the signature is not registered or the record was dropped. Otherwise it is an
        :class:`Operation`, which also creates events if its device is timed. Never raises.

        Args:
            base: The index of the first word of the call's record in ``segment``.
            captured: Whether the call is captured into a CUDA graph.
            issued_in_cpp: Whether C++ issues the call, so that commprof may not see a wait for it.
        """
        known = self._signatures.get(signature)
        if known is None or segment is NO_WORDS:
            return segment
        timeline, is_async = known
        operation = Operation(segment, base, is_async, issued_in_cpp)
        if timeline is not None:
            if captured:
                self.tally.captured += 1
            elif not timeline.has_room:
                self.tally.given_up += 1
                self._guarded(timeline.resolve)
            else:
                self._guarded(lambda: timeline.begin(operation))
        return operation

    def begin(self, signature: int, segment: Segment) -> Segment | bool | None:
        """Return the object into which a compiled call writes its times.

        Compiled calls take the slot of the record afterward, and then set the ``base`` of the operation. Must
        not be called for calls that are captured into a CUDA graph. Never raises.

        Returns:
            The operation; False if the call writes into ``segment`` itself; None if the caller must use
            :meth:`follow`.
        """
        known = self._signatures.get(signature)
        if known is None:
            return False
        timeline, is_async = known
        operation = Operation(segment, 0, is_async)
        if timeline is not None:
            try:
                if not timeline.has_room:
                    return None
                timeline.begin(operation)
            except Exception as error:
                operation.timeline = None
                self.tally.on_fault(error)
        return operation

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.tally.on_fault(error)

    def begin_stream_wait(self, stream: Any) -> Callable[[], None] | None:
        """Begin to time a wait of ``stream`` for another stream.

        Only waits of the default stream are timed, because the program makes no progress during them. Never raises.

        Returns:
            A function to call after the wait was enqueued; None if the wait is not timed.
        """
        try:
            timeline = self._timelines.get(f"cuda:{stream.device_index}")
            if timeline is None or not timeline.has_aside or stream.cuda_stream != DEFAULT_STREAM:
                return None
            wait = timeline.begin_wait(stream)
            return None if wait is None else lambda: self._guarded(lambda: timeline.end_wait(wait, stream))
        except Exception as error:
            self.tally.on_fault(error)
            return None

    def begin_cpp_wait(self, on_times: Callable[[int, int], None]) -> Callable[[], None] | None:
        """Begin to time a wait of C++ for the collectives that C++ has issued.

        Never raises.

        Args:
            on_times: A function that is called later with the begin and the end of the wait on a device, in
                nanoseconds of the host's clock.

        Returns:
            A function to call after the wait; None if no wait is timed.
        """
        waits: list[tuple[Timeline, Wait]] = []
        for timeline in list(self._timelines.values()):
            if timeline is None:
                continue
            try:
                wait = timeline.begin_wait(in_cpp=True, on_times=on_times)
            except Exception as error:
                self.tally.on_fault(error)
                continue
            if wait is not None:
                waits.append((timeline, wait))
        if not waits:
            return None

        def end() -> None:
            for timeline, wait in waits:
                self._guarded(functools.partial(timeline.end_wait, wait))

        return end

    def forget_cpp(self) -> None:
        """Stop timing the operations that C++ has issued so far, because no wait for them can be observed."""
        for timeline in list(self._timelines.values()):
            if timeline is not None:
                timeline.forget_cpp()

    def end_step(self) -> None:
        """Resolve the completed events at the end of a step, and set a new anchor. Never raises."""
        for timeline in list(self._timelines.values()):
            if timeline is None:
                continue
            self._guarded(timeline.end_step)

    def finish(self) -> str | None:
        """Resolve the events that the devices have reached.

        Returns:
            A summary of the timed operations; None if no device was used.
        """
        timelines = [timeline for timeline in self._timelines.values() if timeline is not None]
        if not timelines:
            return None
        now = self.tally.clock()
        for timeline in timelines:
            try:
                timeline.resolve(device_timeline.MOST_OPEN)
            except Exception as error:
                self.tally.on_fault(error)
        unresolved = sum(timeline.unresolved for timeline in timelines)
        errors = [timeline.clock.error_ns(now) for timeline in timelines]
        sentences = [f"{self.tally.timed} collectives were timed on the device"]
        known = [error for error in errors if error is not None]
        if known:
            sentences[0] += f", within {max(known) / 1000:.0f} us of the host's clock"
        for number, reason in (
            (self.tally.cpp_waits, "waits in C++ were timed there"),
            (
                sum(timeline.unknown_aside for timeline in timelines),
                "of these were on side streams, and no wait of the default stream for them was seen: their exposed time is "
                "unknown",
            ),
            (unresolved, "had not ended on the device when recording did"),
            (self.tally.given_up, f"were not, since {device_timeline.MOST_OPEN} others were under way"),
            (self.tally.captured, "were not, since a CUDA graph was being captured"),
        ):
            if number:
                sentences.append(f"{number} {reason}")
        return "; ".join(sentences)
