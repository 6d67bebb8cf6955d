"""Timing events of accelerators, behind an interface that tests can replace."""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch

DEFAULT_STREAM: Final = 0  # its handle
_MOST_POOLED: Final = 8192
_is_capturing: Final = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
# Below torch's own functions in Python, which take 1.5 us for the current stream and 3.5 us to record an event.
_handle_of_stream: Final = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_record: Final = getattr(getattr(torch._C, "_CudaEventBase", None), "record", None)


class Event(Protocol):
    """A mark in the queue of a device."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from it to ``end``; both were reached."""


class EventSource(Protocol):
    """What one kind of accelerator offers for timing."""

    def record(self, event: Any, index: int, stream: Any = None) -> Event:
        """Put a mark into ``stream``, or the current one of device ``index``: ``event``, or a new one where that is None."""

    def is_aside(self, index: int) -> bool:
        """Whether the current stream of device ``index`` is one beside that on which programs work by default."""

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph, during which no mark may be made or asked for."""


class CudaEvents:
    """Events of CUDA, and of ROCm under the same name. One object serves one device."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}  # by handle; torch never destroys a stream

    def record(self, event: Any, index: int, stream: Any = None) -> Event:
        """Put a mark into ``stream``, or the current one of device ``index``: ``event``, or a new one where that is None."""
        if event is None:
            event = torch.cuda.Event(enable_timing=True)
        if _record is None or _handle_of_stream is None:
            event.record(torch.cuda.current_stream(index) if stream is None else stream)
            return event  # type: ignore[no-any-return]
        if stream is None:
            handle = _handle_of_stream(index)
            stream = self._streams.get(handle)
            if stream is None:
                stream = self._streams[handle] = torch.cuda.current_stream(index)
        _record(event, stream)
        return event  # type: ignore[no-any-return]

    def is_aside(self, index: int) -> bool:
        """Whether the current stream of device ``index`` is not its default one, whose handle is :data:`DEFAULT_STREAM`."""
        if _handle_of_stream is None:
            return bool(torch.cuda.current_stream(index).cuda_stream)
        return bool(_handle_of_stream(index))

    def is_capturing(self) -> bool:
        """Whether the current stream records a CUDA graph."""
        return _is_capturing is not None and bool(_is_capturing())


class EventPool:
    """Reused events of one device, because creating one is slow. An event belongs to the device of its first use."""

    def __init__(self, source: EventSource, index: int) -> None:
        self.source = source
        self.index = index
        self.created = 0
        self._free: list[Event] = []

    def mark(self, stream: Any = None) -> Event:
        """Put an event into ``stream``, or the device's current one."""
        free = self._free
        try:
            event: Event | None = free.pop()
        except IndexError:
            event = None
            self.created += 1
        return self.source.record(event, self.index, stream)

    def give(self, *events: Event | None) -> None:
        """Return events that are not read any more."""
        if len(self._free) < _MOST_POOLED:
            self._free.extend(event for event in events if event is not None)
