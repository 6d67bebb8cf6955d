"""Writes Python stacks on request: faulthandler on an otherwise unused real-time signal.

For a hung job in which no other process may read the stacks (ptrace is refused). faulthandler's handler takes no lock and
allocates nothing, so it works while the program blocks in C++. ``commprof dump`` sends the signal, and only after it
has checked that the process still catches it.
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
# Masks of signals that are caught, ignored, and blocked by the main thread; see proc(5).
_MASKS: Final = frozenset({"SigCgt", "SigIgn", "SigBlk"})


class StackSignal:
    """Has this process write the stack of every thread into a file when it gets one signal. Nothing here raises."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._descriptor = -1
        self._path: Path | None = None

    def install(self, run: Path, stem: str) -> dict[str, Any] | None:
        """Take a signal and make the file; returns both, the file below ``run``, or None where that cannot be done.

        Args:
            stem: name of the rank's files.
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
        """Give the signal back. A file that nobody asked anything of goes too."""
        path = self._path
        self.drop()
        if path is not None:
            with contextlib.suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()
                path.parent.rmdir()

    def drop(self) -> None:
        """Give the signal back and leave the file alone: what a forked child does, whose parent writes there."""
        # Python knows of a handler that the program has set since; faulthandler would take it out.
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
    """A real-time signal that is neither caught, ignored nor blocked; None where there is none, or that is not known.

    Args:
        status: the process's file of that name in /proc. It knows of handlers that were set outside Python, too.
    """
    taken = 0
    try:
        for line in status.read_text().splitlines():
            name, _, mask = line.partition(":")
            if name in _MASKS:
                taken |= int(mask, 16)
    except (OSError, ValueError):
        return None
    # The first and last few are those that programs choose by hand (SIGRTMIN+1, SIGRTMAX).
    candidates = range(signal.SIGRTMAX - 3, signal.SIGRTMIN + 3, -1)
    return next((number for number in candidates if not taken >> (number - 1) & 1), None)
