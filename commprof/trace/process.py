"""Reads from /proc when a process started, and whether its pid still belongs to the same process.

Standard library only.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any


def start_ticks(pid: int) -> int | None:
    """Return the clock ticks from boot to the start of process ``pid``, and None if unknown.

    This is field 22 of /proc/pid/stat, see proc(5).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # The command name may contain spaces and parentheses.
    if len(fields) < 20 or fields[0] == "Z":
        return None
    return int(fields[19])


def process_start_ns(pid: int) -> int | None:
    """Return the CLOCK_REALTIME at which process ``pid`` started, in ns, exact to one tick. None if unknown."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            if line.startswith("btime "):
                return int(line.split()[1]) * 1_000_000_000 + ticks * 1_000_000_000 // os.sysconf(
                    "SC_CLK_TCK"
                )
    except OSError:
        pass
    return None


def is_alive(process: Any) -> bool | None:
    """Return whether the process with this ``pid``, ``host`` and ``start_ticks`` still runs. None if not known."""
    if not isinstance(process, dict) or not isinstance(process.get("pid"), int):
        return None
    if process.get("host") != socket.gethostname():
        return None
    ticks = start_ticks(process["pid"])
    if ticks is None:
        return False
    recorded = process.get("start_ticks")
    return recorded is None or recorded == ticks
