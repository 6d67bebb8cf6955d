"""Pages that the server draws as soon as their HTML is requested, while the browser still loads the code of Dash."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Generic, NamedTuple, TypeVar

_Drawn = TypeVar("_Drawn")

_SECONDS: Final = 30.0  # that a drawing is kept for a browser that has not asked for it


class _Asked(NamedTuple):
    pathname: str
    search: str
    scheme: str | None


class _Early(NamedTuple, Generic[_Drawn]):
    asked: _Asked
    begun: float
    drawing: Future[_Drawn]


class EarlyDrawings(Generic[_Drawn]):
    """The last drawing that no browser has asked for yet.

    Args:
        draw: draws the page of a path, a query ("" or beginning with "?") and a scheme as the browser reports it.
    """

    def __init__(self, draw: Callable[[str, str, str | None], _Drawn]) -> None:
        self._draw = draw
        self._lock = threading.Lock()
        self._is_drawing = threading.Lock()
        self._last: _Early[_Drawn] | None = None
        self._scheme: str | None = "light wide"  # of the last page: the next one has the same, most likely

    def begin(self, pathname: str, search: str) -> None:
        """Draw the page of an address, whose HTML is being sent, beside it; not while another one is drawn so."""
        if not self._is_drawing.acquire(blocking=False):
            return
        early = _Early(_Asked(pathname, search, self._scheme), time.monotonic(), Future[_Drawn]())
        with self._lock:
            self._last = early
        # A thread of its own, which ends: one that waits would keep an engine of DuckDB. Python waits for it when it exits:
        # a daemon thread that is in DuckDB then aborts the process.
        thread = threading.Thread(target=self._run, args=[early], name="commprof early drawing", daemon=False)
        try:
            thread.start()
        except RuntimeError:
            # The limit of threads is reached: the page is drawn when the browser asks for it.
            with self._lock:
                self._last = None
            self._is_drawing.release()

    def take(self, pathname: str, search: str, scheme: str | None) -> _Drawn | None:
        """Return the drawing for an address and scheme, once; None if it has to be drawn now."""
        with self._lock:
            self._scheme = scheme
            early = self._last
            if early is None or early.asked != _Asked(pathname, search, scheme):
                return None
            self._last = None
        return early.drawing.result() if time.monotonic() - early.begun < _SECONDS else None

    def _run(self, early: _Early[_Drawn]) -> None:
        try:
            early.drawing.set_result(self._draw(*early.asked))
        except BaseException as error:
            early.drawing.set_exception(error)
        finally:
            self._is_drawing.release()
