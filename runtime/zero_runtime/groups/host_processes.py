"""The processes of the ranks of one host, and which of them have ended, from the kernel's process table (Linux)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

_PROC: Final = Path("/proc")


class HostProcesses:
    """The processes on this host that have constructed this object with the same store and key.

    Args:
        store: The store of the process group.
        key: A key that is equal on all ranks.
        rank: The rank of this process.
    """

    def __init__(self, store: Any, key: str, rank: int) -> None:
        self._store = store
        self._rank = rank
        host, started = _host(), _started("self")
        self._key = f"{key}/{host}"
        self._known: dict[int, tuple[int, str]] = {}  # process id and start time, by rank
        if host is not None and started is not None:
            mine = json.dumps([rank, os.getpid(), started])
            store.set(f"{self._key}/{store.add(self._key, 1)}", mine)

    def ended(self) -> dict[int, int]:
        """Return the ids of the processes that have ended, by rank. Processes on other hosts are not known."""
        return self._where(ended=True)

    def running(self) -> dict[int, int]:
        """Return the ids of the processes on this host that have not ended, by rank.

        Stopped processes are included.
        """
        return self._where(ended=False)

    def _where(self, ended: bool) -> dict[int, int]:
        while len(self._known) < self._store.add(self._key, 0):
            entry = f"{self._key}/{len(self._known) + 1}"
            if not self._store.check([entry]):
                break  # another rank is writing this entry now
            rank, pid, started = json.loads(self._store.get(entry))
            self._known[rank] = pid, started
        return {
            rank: pid
            for rank, (pid, started) in self._known.items()
            if (_started(str(pid)) != started) is ended
        }


def _host() -> str | None:
    """Return an id of this boot of this host and of its process namespace; None if the id is not known."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return None


def _started(process: str) -> str | None:
    """Return the start time of a process, in the kernel's unit.

    The result is None if the process does not exist, or has ended and waits for its parent.
    """
    try:
        state, *fields = (_PROC / process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
