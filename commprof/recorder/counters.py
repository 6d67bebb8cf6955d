"""Byte counters of the machine's network interfaces, from /proc/net/dev. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

PROC_NET_DEV: Final = Path("/proc/net/dev")
WIRE_VARIABLE: Final = "COMMPROF_WIRE"  # set to 1 by commprof run --wire
WIRE_DIRECTORY: Final = "wire"  # in the run: one file of readings per host
# The number of a rank on its host, as torchrun, Open MPI, MPICH and Slurm tell it.
_LOCAL_RANK_VARIABLES: Final = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)


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

    def read(self, step: int | None = None) -> list[dict[str, Any]]:
        """One row of ``schema.WIRE`` per interface; empty where the system has no such counters.

        Args:
            step: the training step that has just ended; None for a reading at intervals.
        """
        try:
            text = _read(self._source)
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
                **({} if step is None else {"step": step}),
            }
            for device, sent, received in parse_net_dev(text)
        ]


class StepReadings:
    """Reads the counters of this host at the boundaries of training steps, into ``<run>/wire/<host>-<namespace>.jsonl``.

    One process of a host does so: the rank 0 of the host, and of several that take themselves for it, the one that has
    locked the file. What step ``n`` moved is the reading of step ``n`` less the one before it.

    Nothing here raises or waits: the first thing that goes wrong ends the readings.

    Args:
        directory: where the file is; made when the first step begins.
    """

    def __init__(self, directory: Path, counters: InterfaceCounters | None = None) -> None:
        self._directory = directory
        self._counters = counters or InterfaceCounters()
        self._descriptor: int | None = None
        self._step = -1
        self._usable = True

    def begin(self, step: int) -> None:
        """Step ``step`` begins, so the one before it has ended."""
        self._write()
        self._step = step

    def go_back(self) -> None:
        """No step has begun yet after all."""
        self._step = -1

    def finish(self) -> None:
        """The last step has ended."""
        if self._descriptor is None:
            return
        self._write()
        self._usable = False
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def _write(self) -> None:
        if not self._usable:
            return
        try:
            if self._descriptor is None:
                self._descriptor = _open_alone(self._directory)
            rows = self._counters.read(self._step)
            os.write(self._descriptor, "".join(json.dumps(row) + "\n" for row in rows).encode())
        except Exception:  # the counters are an extra; nothing may end a training because of them
            self._usable = False


def step_readings(environment: Mapping[str, str], run: Path) -> StepReadings | None:
    """What reads the counters at each step in this process; None where nobody asked for it, or another rank does it."""
    if environment.get(WIRE_VARIABLE) != "1":
        return None
    is_first = is_first_of_host(environment)
    return StepReadings(run / WIRE_DIRECTORY) if is_first or is_first is None else None


def is_first_of_host(environment: Mapping[str, str]) -> bool | None:
    """Whether a launcher says that this is the first of its processes on this host; None where none says anything."""
    local_rank = next((environment[name] for name in _LOCAL_RANK_VARIABLES if name in environment), None)
    return None if local_rank is None else local_rank == "0"


def _open_alone(directory: Path) -> int:
    """The descriptor of this host's file, locked until the process ends.

    Raises:
        OSError: it cannot be written to, or another process of this host writes it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Containers may share a host name; counters belong to the network namespace.
    namespace = Path("/proc/self/ns/net").stat().st_ino
    file = directory / f"{socket.gethostname().replace('/', '_')}-{namespace}.jsonl"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass  # a file system without locks
    return descriptor


def _read(file: Path) -> str:
    # Twice as fast as a file object, and this is once a step.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(descriptor, 1 << 16), b"")).decode("ascii", "replace")
    finally:
        os.close(descriptor)


def parse_net_dev(text: str) -> list[tuple[str, int, int]]:
    """Device, bytes sent and bytes received of each line of /proc/net/dev (the first and ninth number; see proc(5))."""
    rows = []
    for line in text.splitlines():
        device, colon, numbers = line.partition(":")
        fields = numbers.split()
        if colon and len(fields) >= 9 and fields[0].isdigit() and fields[8].isdigit():
            rows.append((device.strip(), int(fields[8]), int(fields[0])))
    return rows
