"""Observes waits of streams for events. Programs with side streams wait for their collectives in this way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

_METHOD: Final = "wait"


class StreamWaits:
    """Wraps ``torch.cuda.Event.wait``, which ``Stream.wait_event`` and ``Stream.wait_stream`` also call.

    Args:
        begin: A function that is called with the stream that is about to wait. Its result is None, or a
            function to call after the wait was enqueued. ``begin`` must not raise.
    """

    def __init__(self, begin: Callable[[Any], Callable[[], None] | None]) -> None:
        self._begin = begin
        self._patched: tuple[Any, Any] | None = None

    def install(self) -> None:
        """Install the wrapper."""
        original = vars(torch.cuda.Event).get(_METHOD)
        if original is None or self._patched is not None:
            return
        begin = self._begin

        @functools.wraps(original)
        def wait(event: Any, stream: Any = None) -> Any:
            if stream is None:
                stream = torch.cuda.current_stream()
            end = begin(stream)
            result = original(event, stream)
            if end is not None:
                end()
            return result

        setattr(torch.cuda.Event, _METHOD, wait)
        self._patched = (original, wait)

    def remove(self) -> None:
        """Remove the wrapper, unless other code has wrapped it since."""
        if self._patched is None:
            return
        original, wrapper = self._patched
        self._patched = None
        if vars(torch.cuda.Event).get(_METHOD) is wrapper:
            setattr(torch.cuda.Event, _METHOD, original)
