"""Byte counters of the machine's network interfaces, from /proc/net/dev. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from commprof import schema
from commprof.program_exceptions import pass_on

PROC_NET_DEV: Final = Path("/proc/net/dev")
_SNMP: Final = "snmp"  # in the same directory: TCP's own counters
_SOCKETS: Final = ("tcp", "tcp6")  # in the same directory: TCP's sockets
# The size limit of each list of sockets, about 7,000 sockets. A longer list would take too long to read.
_MOST_SOCKETS_BYTES: Final = 1 << 20
_LISTENING: Final = "0A"
_ONE: Final = bytes((0, 0, 0, 1))  # the end of ::1
_MAPPED: Final = bytes((0, 0, 255, 255))  # precedes the four bytes of an IPv4 address within IPv6
WIRE_VARIABLE: Final = "COMMPROF_WIRE"  # set to 1 by commprof run --wire
WIRE_DIRECTORY: Final = "wire"  # the directory in the run with one file of readings per host
_INTERVAL_NS: Final = 500_000_000
_READING_NS: Final = 2_000_000  # an undisturbed reading takes about 0.1 ms
_ATTEMPTS: Final = 3
# The variables in which torchrun, Open MPI, MPICH and Slurm set the local rank.
_LOCAL_RANK_VARIABLES: Final = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)


class InterfaceCounters:
    """Reads the counters of every interface of this network namespace, including the loopback.

    The counters include the bytes of all processes of the machine, not only of the training.
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

    def read(self, step: int | None = None, queued: bool = False) -> list[dict[str, Any]]:
        """Return one row of ``schema.WIRE`` per interface; an empty list if the system has no such counters.

        Args:
            step: The training step that has just ended; None for a reading that belongs to no step.
            queued: Whether to also read the bytes that TCP queues, which takes about 3 ms.
        """
        # The queues are read before the counters. Bytes that leave in between are in both readings, so the result is
        # too high rather than too low.
        unsent = queued_bytes(self._source.parent) if queued else None
        try:
            text, now = self._text()
        except OSError as error:
            pass_on(error)
            return []
        resent = resent_segments(self._source.with_name(_SNMP))
        return [
            {
                "host": self._host,
                "device": device,
                "kind": "interface",
                "time_ns": now,
                "sent_bytes": sent,
                "received_bytes": received,
                "sent_packets": packets,
                **({} if resent is None else {"resent_segments": resent}),
                **({} if unsent is None else {"queued_bytes": unsent[device == schema.LOOPBACK]}),
                **({} if step is None else {"step": step}),
            }
            for device, sent, received, packets in parse_net_dev(text)
        ]

    def _text(self) -> tuple[str, int]:
        """Return the text of the counters and its time. Read again after a delay, so that the time is right."""
        for _ in range(_ATTEMPTS):
            before = self._clock()
            text = _read(self._source)
            now = self._clock()
            if now - before < _READING_NS:
                break
        return text, now


class HostReadings:
    """Writes readings of this host's counters to ``<run>/wire/``.

    Each process reads the counters before its first collective and after its last collective. One process of the host
    also reads them at the boundaries of training steps: at every boundary, or at most once per half second. This
    process is local rank 0. If several processes consider themselves local rank 0, it is the process that has locked
    the file. The bytes that step ``n`` moved are the reading of step ``n`` minus the previous reading. The first and
    the last reading at a step, and the last reading of each process, also contain the bytes that TCP queues.

    No method raises or waits. The first error ends the readings.

    Args:
        directory: The directory of the files, which is created at the first reading.
        every_step: Whether to read at every step and write the number of the step.
        is_first: Whether this process is the first process of its host according to the launcher; None if no launcher
            provides this information.
        counters: The object that reads the counters; None for the counters of this machine.
    """

    def __init__(
        self,
        directory: Path,
        every_step: bool = False,
        is_first: bool | None = None,
        counters: InterfaceCounters | None = None,
    ) -> None:
        self._directory = directory
        self._every_step = every_step
        self._between = is_first is not False
        self._counters = counters or InterfaceCounters()
        self._descriptor: int | None = None
        self._step = -1
        self._usable = True
        self._next_ns = 0

    def open(self) -> None:
        """Write the first reading, before the first collective."""
        self._write(None)

    def begin(self, step: int, now: int = 0) -> None:
        """Begin step ``step`` at ``now`` (perf_counter_ns), so that the previous step has ended."""
        if self._between and (self._every_step or now >= self._next_ns):
            self._write(self._step if self._every_step else None, queued=self._every_step and self._step < 0)
            self._next_ns = now + _INTERVAL_NS
        self._step = step

    def go_back(self) -> None:
        """Reset to the state in which no step has begun."""
        self._step = -1

    def end_steps(self) -> None:
        """Write the reading of the last step that is recorded."""
        if self._between and self._every_step:
            self._write(self._step, queued=True)
        self._between = False

    def finish(self) -> None:
        """Write the last reading, after the last collective of this process."""
        self._write(self._step if self._between and self._every_step else None, queued=True)
        self._usable = False
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)

    def _write(self, step: int | None, queued: bool = False) -> None:
        if not self._usable:
            return
        try:
            if self._descriptor is None:
                self._descriptor, self._between = _open(self._directory, alone=self._between)
            rows = self._counters.read(step, queued)
            os.write(self._descriptor, "".join(json.dumps(row) + "\n" for row in rows).encode())
        except Exception as error:  # the counters are optional, so an error must not stop the training
            pass_on(error)
            self._usable = False


def host_readings(environment: Mapping[str, str], run: Path) -> HostReadings:
    """Return the object that reads the counters in this process, as configured by the environment."""
    every_step = environment.get(WIRE_VARIABLE) == "1"
    return HostReadings(run / WIRE_DIRECTORY, every_step, is_first_of_host(environment))


def is_first_of_host(environment: Mapping[str, str]) -> bool | None:
    """Return whether this process has local rank 0 according to its launcher; None without such information."""
    local_rank = next((environment[name] for name in _LOCAL_RANK_VARIABLES if name in environment), None)
    return None if local_rank is None else local_rank == "0"


def readings_file(directory: Path, of: str = "") -> Path:
    """Return the file in ``directory`` for readings of this host; ``of`` distinguishes several files of one host."""
    # The name contains the network namespace, because containers may share a host name but not the counters.
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return directory / f"{socket.gethostname().replace('/', '_')}-{namespace}{of and f'-{of}'}.jsonl"


def _open(directory: Path, alone: bool) -> tuple[int, bool]:
    """Return the descriptor of a file for this process, and whether this file is the file of the host.

    The file of the host stays locked until the process ends.

    Args:
        directory: The directory of the files.
        alone: Whether to try the file of the host first. If another process has locked it, this process gets a file of
            its own.

    Raises:
        OSError: The file cannot be written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if alone:
        descriptor = _append_to(readings_file(directory))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor, True
        except BlockingIOError:
            os.close(descriptor)
        except OSError:
            return descriptor, True  # the file system does not support locks
    return _append_to(readings_file(directory, str(os.getpid()))), False


def _append_to(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _read(file: Path, most: int | None = None) -> str:
    """Return the text of ``file``.

    Raises:
        OSError: The file cannot be read, or has more than ``most`` bytes.
    """
    # This runs once per step, and is twice as fast as a file object.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        blocks, size = [], 0
        while block := os.read(descriptor, 1 << 16):
            blocks.append(block)
            size += len(block)
            if most is not None and size > most:
                raise OSError(f"{file} has more than {most} bytes")
        return b"".join(blocks).decode("ascii", "replace")
    finally:
        os.close(descriptor)


def parse_net_dev(text: str) -> list[tuple[str, int, int, int]]:
    """Return device, bytes sent, bytes received and packets sent of each line of /proc/net/dev (see proc(5))."""
    rows = []
    for line in text.splitlines():
        device, colon, numbers = line.partition(":")
        fields = numbers.split()
        if colon and len(fields) >= 10 and all(fields[place].isdigit() for place in (0, 8, 9)):
            rows.append((device.strip(), int(fields[8]), int(fields[0]), int(fields[9])))
    return rows


def resent_segments(file: Path) -> int | None:
    """Return the number of segments that TCP retransmitted, from /proc/net/snmp (see proc(5)); None on failure."""
    try:
        names, counts = (line.split() for line in _read(file).splitlines() if line.startswith("Tcp:"))
        return int(counts[names.index("RetransSegs")])
    except (OSError, ValueError, IndexError) as error:
        pass_on(error)
        return None


def queued_bytes(directory: Path) -> tuple[int, int] | None:
    """Return the bytes that the host's programs passed to TCP and that no peer has acknowledged.

    These include bytes that have left the interface but are not yet acknowledged.

    Args:
        directory: The directory that contains ``tcp`` and ``tcp6`` (see proc(5)); either file may be absent.

    Returns:
        The bytes for other hosts, and the bytes for this host. None if neither file can be read, or one is too long.
    """
    totals, is_readable = [0, 0], False
    for name in _SOCKETS:
        try:
            text = _read(directory / name, _MOST_SOCKETS_BYTES)
        except FileNotFoundError:
            continue
        except OSError as error:
            pass_on(error)
            return None
        is_readable = True
        for line in text.splitlines()[1:]:
            fields = line.split()
            try:
                local, remote = (address.partition(":")[0] for address in fields[1:3])
                waiting = 0 if fields[3] == _LISTENING else int(fields[4].partition(":")[0], 16)
                # A host reaches all its own addresses through the loopback interface.
                totals[local == remote or _is_loopback(remote)] += waiting
            except (ValueError, IndexError):
                continue
    return (totals[0], totals[1]) if is_readable else None


def _is_loopback(address: str) -> bool:
    """Return whether ``address``, in the hexadecimal form of /proc/net/tcp and tcp6, is in 127.0.0.0/8 or is ::1."""
    # The kernel prints the four bytes of each word as a number in this machine's byte order.
    *before, last = (int(word, 16).to_bytes(4, sys.byteorder) for word in re.findall(".{8}", address))
    if before and before[-1] != _MAPPED:
        return last == _ONE and not any(map(any, before))
    return last[0] == 127
