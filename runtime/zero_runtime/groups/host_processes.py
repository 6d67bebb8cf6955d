"""The processes of the ranks of one host: which of them have ended, by the kernel's table of processes (Linux)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

_PROC: Final = Path("/proc")


class HostProcesses:
    """The processes that have called this with the same store and key, on this host.

    Args:
        store: of the process group.
        key: equal on all ranks.
        rank: of this process.
    """

    def __init__(self, store: Any, key: str, rank: int) -> None:
        self._store = store
        self._rank = rank
        host, started = _host(), _started("self")
        self._key = f"{key}/{host}"
        self._known: dict[int, tuple[int, str]] = {}  # process and start, by rank
        if host is not None and started is not None:
            mine = json.dumps([rank, os.getpid(), started])
            store.set(f"{self._key}/{store.add(self._key, 1)}", mine)

    def ended(self) -> dict[int, int]:
        """The processes that have ended, by rank. Others than those of this host are not known."""
        return self._where(ended=True)

    def running(self) -> dict[int, int]:
        """The processes of this host that have not ended, stopped ones too, by rank."""
        return self._where(ended=False)

    def _where(self, ended: bool) -> dict[int, int]:
        while len(self._known) < self._store.add(self._key, 0):
            entry = f"{self._key}/{len(self._known) + 1}"
            if not self._store.check([entry]):
                break  # another rank is just writing it
            rank, pid, started = json.loads(self._store.get(entry))
            self._known[rank] = pid, started
        return {
            rank: pid
            for rank, (pid, started) in self._known.items()
            if (_started(str(pid)) != started) is ended
        }


def _host() -> str | None:
    """This boot of this host, and the namespace of its process numbers; None if that is not known."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return None


def _started(process: str) -> str | None:
    """When a process began, in the kernel's unit; None if there is none, or it has ended and waits for its parent."""
    try:
        state, *fields = (_PROC / process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
