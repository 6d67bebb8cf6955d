"""Computes answers that take seconds in another process, so that no page waits for them.

The process has a low priority, computes one answer at a time and exits after each, which frees its memory.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context, parent_process
from typing import Any, Final

_MOST_WAITING: Final = 64  # answers that no page has read yet
_NICENESS: Final = 10


class Background:
    """The answers that another process computes or has computed, until a page reads them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None
        self._asked: dict[Hashable, Future[Any]] = {}

    def ask(self, key: Hashable, answer: Callable[[Any], Any], argument: Any) -> Any | None:
        """Return ``answer(argument)``; None while it is being computed. The first call starts the computation.

        Args:
            key: identifies the question; its answer is returned once.
            answer: a function of a module; its result is not None.

        Raises:
            Exception: the exception of ``answer``; the next call starts again.
        """
        with self._lock:
            future = self._asked.get(key)
            if future is None:
                future = self._asked[key] = self._submit(answer, argument)
                self._forget_the_oldest()
            if not future.done():
                return None
            del self._asked[key]
            if isinstance(future.exception(), BrokenProcessPool):
                self._pool = None
        return future.result()

    def _submit(self, answer: Callable[[Any], Any], argument: Any) -> Future[Any]:
        if self._pool is not None:
            with suppress(BrokenProcessPool):
                return self._pool.submit(answer, argument)
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _stand_back, max_tasks_per_child=1)
        return self._pool.submit(answer, argument)

    def _forget_the_oldest(self) -> None:
        done = [key for key, future in self._asked.items() if future.done()]
        for key in done[: max(0, len(self._asked) - _MOST_WAITING)]:
            del self._asked[key]


def _stand_back() -> None:
    # Ctrl-C in the dashboard's terminal comes here too. The dashboard ends this process, before a library can say what it
    # thinks of an interpreter that ends in the middle of its work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit with a dashboard that was killed: this process would wait for its next question for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


background: Final = Background()
