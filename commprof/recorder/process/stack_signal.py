"""Writes Python stacks on request, by means of faulthandler on an otherwise unused real-time signal.

This is for a hung job in which no other process may read the stacks (ptrace is refused). The handler of faulthandler
takes no lock and allocates no memory, so it works while the program blocks in C++. ``commprof dump`` sends the signal,
but only after it has checked that the process still catches the signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path
from typing import Any, Final

from commprof.trace.directory import STACKS_DIRECTORY

_STATUS: Final = Path("/proc/self/status")
# The masks of the signals that are caught, ignored, and blocked by the main thread; see proc(5).
_MASKS: Final = frozenset({"SigCgt", "SigIgn", "SigBlk"})


class StackSignal:
    """Makes this process write the stack of every thread to a file when it receives a signal. No method raises."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._descriptor = -1
        self._path: Path | None = None

    def install(self, run: Path, stem: str) -> dict[str, Any] | None:
        """Register the handler for a free signal, and create the file.

        Args:
            run: The run directory.
            stem: The name of the rank's files without their suffix.

        Returns:
            The number of the signal, and the path of the file relative to ``run``. None if this is not possible.
        """
        number = free_signal(_STATUS)
        if number is None or not hasattr(faulthandler, "register"):
            return None
        path = run / STACKS_DIRECTORY / f"{stem}.txt"
        try:
            path.parent.mkdir(exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            faulthandler.register(number, self._descriptor, all_threads=True, chain=False)
        except (OSError, ValueError, RuntimeError):
            self._close()
            return None
        self._number, self._path = number, path
        return {"signal": number, "file": str(path.relative_to(run))}

    def remove(self) -> None:
        """Unregister the handler, and delete the file if it is empty."""
        path = self._path
        self.drop()
        if path is not None:
            with contextlib.suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()
                path.parent.rmdir()

    def drop(self) -> None:
        """Unregister the handler, but keep the file. A forked child calls this, because its parent uses the file."""
        # If the program has set its own handler since, faulthandler must not remove this handler.
        if self._number is not None and not callable(signal.getsignal(self._number)):
            faulthandler.unregister(self._number)
        self._number = self._path = None
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def free_signal(status: Path) -> int | None:
    """Return a real-time signal that is neither caught, ignored nor blocked; None if no such signal is known.

    Args:
        status: The file ``status`` of the process in /proc. It also lists handlers that were set outside Python.
    """
    taken = 0
    try:
        for line in status.read_text().splitlines():
            name, _, mask = line.partition(":")
            if name in _MASKS:
                taken |= int(mask, 16)
    except (OSError, ValueError):
        return None
    # The first and last few signals are excluded, because programs typically choose them (SIGRTMIN+1, SIGRTMAX).
    candidates = range(signal.SIGRTMAX - 3, signal.SIGRTMIN + 3, -1)
    return next((number for number in candidates if not taken >> (number - 1) & 1), None)
