"""Exposed time of collectives on the streams of devices: creates the events, and converts their times to host times.

Events are resolved in batches at the ends of steps, and no tensor or handle is kept for them; see
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
    """Times the collectives of accelerators, and places the times on the host's clock.

    Args:
        enabled: whether events are made at all.
        on_fault: called with what an event raised; the operation goes untimed.
        sources: what makes events, by type of device.
        clock: nanoseconds, the clock of the records.
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
        """Calls with ``signature`` carry tensors of ``device`` (``cuda:0``)."""
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
        """Where to write the times of a call that is about to be made: ``segment``, or what makes events as well.

        Never raises.

        Args:
            base: the index of the first word of the call's record in ``segment``.
            captured: the call goes into a CUDA graph.
            issued_in_cpp: C++ issues it, so that no wait for it may be seen.
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
        """The same for the compiled calls, which take the record's place in ``segment`` next, and say then where it is.

        Not for what goes into a CUDA graph.

        Returns what to write times into; False: ``segment`` itself; None: it is a case for :meth:`follow`. Never raises.
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
        """The stream ``stream`` is about to wait for another; what to call when it does; None: it is of no interest.

        Only the default stream is: while it waits, the program makes no progress. Never raises.
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
        """C++ is about to wait for what it has issued; what to call when it has; None: nothing of it is on a device.

        Never raises.

        Args:
            on_times: given the begin and the end of the wait on a device, in nanoseconds of the host's clock, once known.
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
        """What C++ has issued until now is not waited for in a way that can be seen."""
        for timeline in list(self._timelines.values()):
            if timeline is not None:
                timeline.forget_cpp()

    def end_step(self) -> None:
        """A step has ended: resolve what can be, and count from a new anchor. Never raises."""
        for timeline in list(self._timelines.values()):
            if timeline is None:
                continue
            self._guarded(timeline.end_step)

    def finish(self) -> str | None:
        """Resolve what the devices have reached by now; a sentence on what was timed, None when no device was used."""
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
