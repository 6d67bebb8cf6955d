"""Handles Ctrl-C at any moment: prints one line and exits with code 130, without a traceback.

Python raises KeyboardInterrupt at any line. During the import of a compiled package, the exception may be swallowed or
become an ImportError. It may also be printed as a traceback that no code can catch. So the handler delays an interrupt
until the current import is complete.
"""

from __future__ import annotations

import builtins
import os
import signal
import threading
from typing import Any, Final

from commprof.exit_codes import ExitCode

_LINE: Final = b"commprof: error: interrupted\n"


class Interrupts:
    """Handles SIGINT in the process of the command. Only the main thread may use it."""

    def __init__(self) -> None:
        self._import = builtins.__import__
        self._main = threading.get_ident()
        self._depth = 0
        self._waits = False

    def install(self) -> None:
        """Install the handler, which raises KeyboardInterrupt only outside of imports.

        If SIGINT is ignored, it stays ignored.
        """
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            builtins.__import__ = self._imported
            signal.signal(signal.SIGINT, self._on_interrupt)

    def finish(self) -> None:
        """Let an interrupt end the process at once, because the command is done and Python shuts down."""
        if signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, lambda *_: os._exit(ExitCode.INTERRUPTED))
        builtins.__import__ = self._import

    def _on_interrupt(self, *_: object) -> None:
        if not self._depth:
            raise KeyboardInterrupt
        if self._waits:  # a second interrupt during the same import: the import may hang
            os.write(2, _LINE)
            os._exit(ExitCode.INTERRUPTED)
        self._waits = True

    def _imported(self, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != self._main:
            return self._import(*arguments, **options)
        self._depth += 1
        try:
            return self._import(*arguments, **options)
        finally:
            self._depth -= 1
            if self._waits and not self._depth:
                self._waits = False
                raise KeyboardInterrupt
