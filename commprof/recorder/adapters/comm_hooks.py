"""Tags the collectives of DDP's communication hooks, including collectives issued later in callbacks of futures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from commprof import hooks
from commprof.recorder.adapters.parts import Part

# The module of Future, the base of torch.futures.Future and the class of the result of Work.get_future.
_FUTURE: Final = "torch._C"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.in_hook = False


class CommHooks:
    """Applies the tag of a hook to the callbacks that the hook attaches to futures, and to their own callbacks.

    A hook such as PowerSGD's reduces in several rounds. When a round is complete, a callback starts the next
    round, on the thread that completed the previous round.
    """

    def __init__(self) -> None:
        self._thread = _Thread()

    def parts(self) -> list[Part]:
        """Return the functions to wrap, each with its wrapper."""
        return [
            Part(_FUTURE, "Future.then", self._wrap_attach),
            Part(_FUTURE, "Future.add_done_callback", self._wrap_attach, optional=True),
        ]

    @contextmanager
    def running(self, tag: hooks.tag) -> Iterator[None]:
        """Open ``tag`` while a hook, or one of its callbacks, runs on this thread."""
        before = self._thread.in_hook
        self._thread.in_hook = True
        try:
            with tag:
                yield
        finally:
            self._thread.in_hook = before

    def _wrap_attach(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def attach(future: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
            tag = hooks.current_tag() if self._thread.in_hook else None
            if tag is None:
                return original(future, callback, *args, **kwargs)

            def continued(completed: Any) -> Any:
                with self.running(tag):
                    return callback(completed)

            return original(future, continued, *args, **kwargs)

        return attach
