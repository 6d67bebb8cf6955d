"""Byte counters of the machine's network interfaces, from /proc/net/dev. Standard library only."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

PROC_NET_DEV: Final = Path("/proc/net/dev")


class InterfaceCounters:
    """Reads the counters of every interface of this network namespace, the loopback included.

    They belong to the whole machine: all processes, not only the training.
    """

    def __init__(
        self,
        source: Path = PROC_NET_DEV,
        host: str | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._source = source
        self._host = host or socket.gethostname()
        self._clock = clock

    def read(self) -> list[dict[str, Any]]:
        """One row of ``schema.WIRE`` per interface; empty where the system has no such counters."""
        try:
            text = self._source.read_text()
        except OSError:
            return []
        now = self._clock()
        return [
            {
                "host": self._host,
                "device": device,
                "kind": "interface",
                "time_ns": now,
                "sent_bytes": sent,
                "received_bytes": received,
            }
            for device, sent, received in parse_net_dev(text)
        ]


def parse_net_dev(text: str) -> list[tuple[str, int, int]]:
    """Device, bytes sent and bytes received of each line of /proc/net/dev (the first and ninth number; see proc(5))."""
    rows = []
    for line in text.splitlines():
        device, colon, numbers = line.partition(":")
        fields = numbers.split()
        if colon and len(fields) >= 9 and fields[0].isdigit() and fields[8].isdigit():
            rows.append((device.strip(), int(fields[8]), int(fields[0])))
    return rows
