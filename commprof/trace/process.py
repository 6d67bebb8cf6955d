"""When a process started, and whether its number still belongs to the same process, from /proc. Standard library
only."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any


def start_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the start of process ``pid`` (field 22 of /proc/pid/stat, see proc(5)); None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command before it may hold spaces and parentheses
    if len(fields) < 20 or fields[0] == "Z":
        return None
    return int(fields[19])


def process_start_ns(pid: int) -> int | None:
    """When process ``pid`` started, CLOCK_REALTIME in ns, to within a tick; None if unknown."""
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
    """Whether the process described by ``pid``, ``host`` and ``start_ticks`` still runs; None if that is not known."""
    if not isinstance(process, dict) or not isinstance(process.get("pid"), int):
        return None
    if process.get("host") != socket.gethostname():
        return None
    ticks = start_ticks(process["pid"])
    if ticks is None:
        return False
    recorded = process.get("start_ticks")
    return recorded is None or recorded == ticks
