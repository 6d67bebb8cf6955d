"""Names the threads that issue collectives, as the trace shows them."""

from __future__ import annotations

import threading
from typing import Any, Final

_MOST_NATIVE: Final = 1000


class ThreadNames:
    """Names the threads of this process, so that the same thread always has the same name.

    To Python a thread that C++ has started is a new one each time that it comes in, with a new name.
    """

    def __init__(self) -> None:
        self._native: dict[int, str] = {}

    def row(self) -> dict[str, Any]:
        """The current thread: ``name``, and ``ident``, by which py-spy and faulthandler know it."""
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
