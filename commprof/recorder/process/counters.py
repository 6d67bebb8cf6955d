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
_SNMP: Final = "snmp"  # beside it: TCP's own counters
_SOCKETS: Final = ("tcp", "tcp6")  # and its sockets
# Of either list, some 7,000 sockets: what is longer takes too long to read.
_MOST_SOCKETS_BYTES: Final = 1 << 20
_LISTENING: Final = "0A"
_ONE: Final = bytes((0, 0, 0, 1))  # the end of ::1
_MAPPED: Final = bytes((0, 0, 255, 255))  # before the four bytes of an IPv4 address within IPv6
WIRE_VARIABLE: Final = "COMMPROF_WIRE"  # set to 1 by commprof run --wire
WIRE_DIRECTORY: Final = "wire"  # in the run: one file of readings per host
_INTERVAL_NS: Final = 500_000_000
_READING_NS: Final = 2_000_000  # a reading takes some 0.1 ms
_ATTEMPTS: Final = 3
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

    def read(self, step: int | None = None, queued: bool = False) -> list[dict[str, Any]]:
        """One row of ``schema.WIRE`` per interface; empty where the system has no such counters.

        Args:
            step: the training step that has just ended; None for a reading at intervals.
            queued: also read the bytes that TCP queues, which takes some 3 ms.
        """
        # Before the counters: what leaves meanwhile is then in both, so too much is allowed for rather than too little.
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
        """What the system says, and when. Read again where this process was held up meanwhile, so that the time is right."""
        for _ in range(_ATTEMPTS):
            before = self._clock()
            text = _read(self._source)
            now = self._clock()
            if now - before < _READING_NS:
                break
        return text, now


class HostReadings:
    """Reads the counters of this host into ``<run>/wire/``: before the first collective of this process, and after its last.

    One process of the host reads in between as well, at the boundaries of training steps: each of them, or one every
    half second. That is the rank 0 of the host, and of several that take themselves for it, the one that has locked
    the file. What step ``n`` moved is the reading of step ``n`` less the one before it. The first and the last at a step,
    and the last of each process, have what TCP holds back as well.

    Nothing here raises or waits: the first error ends the readings.

    Args:
        directory: where the files are; made at the first reading.
        every_step: read at each step, and say which.
        is_first: a launcher says that this process is the first of its host; None where none says anything.
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
        """No collective has been issued yet."""
        self._write(None)

    def begin(self, step: int, now: int = 0) -> None:
        """Step ``step`` begins at ``now`` (perf_counter_ns), so the one before it has ended."""
        if self._between and (self._every_step or now >= self._next_ns):
            self._write(self._step if self._every_step else None, queued=self._every_step and self._step < 0)
            self._next_ns = now + _INTERVAL_NS
        self._step = step

    def go_back(self) -> None:
        """No step has begun yet after all."""
        self._step = -1

    def end_steps(self) -> None:
        """The last step has ended that is to be recorded."""
        if self._between and self._every_step:
            self._write(self._step, queued=True)
        self._between = False

    def finish(self) -> None:
        """The last collective of this process has ended."""
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
        except Exception as error:  # the counters are optional: an error must not stop the training
            pass_on(error)
            self._usable = False


def host_readings(environment: Mapping[str, str], run: Path) -> HostReadings:
    """What reads the counters in this process, as its environment asks."""
    every_step = environment.get(WIRE_VARIABLE) == "1"
    return HostReadings(run / WIRE_DIRECTORY, every_step, is_first_of_host(environment))


def is_first_of_host(environment: Mapping[str, str]) -> bool | None:
    """Whether a launcher says that this is the first of its processes on this host; None where none says anything."""
    local_rank = next((environment[name] for name in _LOCAL_RANK_VARIABLES if name in environment), None)
    return None if local_rank is None else local_rank == "0"


def readings_file(directory: Path, of: str = "") -> Path:
    """The file in ``directory`` for readings of this host; ``of`` tells several of one host apart."""
    # Containers may share a host name; counters belong to the network namespace.
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return directory / f"{socket.gethostname().replace('/', '_')}-{namespace}{of and f'-{of}'}.jsonl"


def _open(directory: Path, alone: bool) -> tuple[int, bool]:
    """The descriptor of a file for this process, and whether it is the host's own, locked until the process ends.

    Args:
        alone: the host's file is wanted, unless another process has locked it.

    Raises:
        OSError: it cannot be written to.
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
            return descriptor, True  # a file system without locks
    return _append_to(readings_file(directory, str(os.getpid()))), False


def _append_to(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _read(file: Path, most: int | None = None) -> str:
    """The text of ``file``.

    Raises:
        OSError: it cannot be read, or has more than ``most`` bytes.
    """
    # Twice as fast as a file object, and this is once a step.
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
    """Device, bytes sent, bytes received and packets sent of each line of /proc/net/dev (see proc(5))."""
    rows = []
    for line in text.splitlines():
        device, colon, numbers = line.partition(":")
        fields = numbers.split()
        if colon and len(fields) >= 10 and all(fields[place].isdigit() for place in (0, 8, 9)):
            rows.append((device.strip(), int(fields[8]), int(fields[0]), int(fields[9])))
    return rows


def resent_segments(file: Path) -> int | None:
    """The segments that TCP has sent again, by /proc/net/snmp (see proc(5)); None where that cannot be read."""
    try:
        names, counts = (line.split() for line in _read(file).splitlines() if line.startswith("Tcp:"))
        return int(counts[names.index("RetransSegs")])
    except (OSError, ValueError, IndexError) as error:
        pass_on(error)
        return None


def queued_bytes(directory: Path) -> tuple[int, int] | None:
    """Bytes that the host's programs have handed to TCP and no peer has acknowledged: for other hosts, and for this one.

    Those that have left the interface and are not yet acknowledged are among them.

    Args:
        directory: has ``tcp`` and ``tcp6`` (see proc(5)); either may be absent.

    Returns:
        None where neither can be read, or one is too long.
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
                # A host's own addresses are reached through its loopback interface, whichever they are.
                totals[local == remote or _is_loopback(remote)] += waiting
            except (ValueError, IndexError):
                continue
    return (totals[0], totals[1]) if is_readable else None


def _is_loopback(address: str) -> bool:
    """Whether ``address``, in the hexadecimal words of /proc/net/tcp and tcp6, is one of 127.0.0.0/8 or ::1."""
    # The kernel prints each word as the number that its four bytes are on this machine.
    *before, last = (int(word, 16).to_bytes(4, sys.byteorder) for word in re.findall(".{8}", address))
    if before and before[-1] != _MAPPED:
        return last == _ONE and not any(map(any, before))
    return last[0] == 127
