"""Assigns the names under which the trace shows the threads that issue collectives."""

from __future__ import annotations

import threading
from typing import Any, Final

_MOST_NATIVE: Final = 1000


class ThreadNames:
    """Assigns names to the threads of this process, so that a thread always has the same name.

    Python itself treats a thread that C++ started as a new thread, with a new name, each time it enters Python.
    """

    def __init__(self) -> None:
        self._native: dict[int, str] = {}

    def row(self) -> dict[str, Any]:
        """Return the row of the current thread: ``name``, and ``ident``, which py-spy and faulthandler also print."""
        thread = threading.current_thread()
        name = self._native_name() if isinstance(thread, threading._DummyThread) else thread.name
        return {"name": name, "ident": threading.get_ident()}

    def _native_name(self) -> str:
        number = threading.get_native_id()
        if number not in self._native:
            if len(self._native) >= _MOST_NATIVE:
                return "native"
            self._native[number] = f"native-{len(self._native) + 1}"
        return self._native[number]
