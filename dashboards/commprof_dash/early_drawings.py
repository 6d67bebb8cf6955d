"""Draws pages on the server as soon as their HTML is requested, while the browser still loads the code of Dash."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Generic, NamedTuple, TypeVar

_Drawn = TypeVar("_Drawn")

_SECONDS: Final = 30.0  # how long a drawing is kept for a browser that has not requested it


class _Asked(NamedTuple):
    pathname: str
    search: str
    scheme: str | None


class _Early(NamedTuple, Generic[_Drawn]):
    asked: _Asked
    begun: float
    drawing: Future[_Drawn]


class EarlyDrawings(Generic[_Drawn]):
    """The last early drawing that no browser has requested yet.

    Args:
        draw: Draws the page for a path, a query ("" or beginning with "?") and a scheme as the browser reports
            it.
    """

    def __init__(self, draw: Callable[[str, str, str | None], _Drawn]) -> None:
        self._draw = draw
        self._lock = threading.Lock()
        self._is_drawing = threading.Lock()
        self._last: _Early[_Drawn] | None = None
        # The scheme of the last page, which the next page most likely has, too.
        self._scheme: str | None = "light wide"

    def begin(self, pathname: str, search: str) -> None:
        """Start to draw the page of an address in a thread, while the HTML of the page is sent.

        Nothing happens if another early drawing is in progress.
        """
        if not self._is_drawing.acquire(blocking=False):
            return
        early = _Early(_Asked(pathname, search, self._scheme), time.monotonic(), Future[_Drawn]())
        with self._lock:
            self._last = early
        # The drawing has its own thread, which ends, because a waiting thread of a pool would keep a DuckDB
        # engine. The thread is not a daemon, so that Python waits for it at exit: a daemon thread that is in
        # DuckDB would abort the process.
        thread = threading.Thread(target=self._run, args=[early], name="commprof early drawing", daemon=False)
        try:
            thread.start()
        except RuntimeError:
            # The limit of threads is reached, so the page is drawn when the browser requests it.
            with self._lock:
                self._last = None
            self._is_drawing.release()

    def take(self, pathname: str, search: str, scheme: str | None) -> _Drawn | None:
        """Return the early drawing of an address and scheme, once; None if the page has to be drawn now."""
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
