"""The processes of the ranks on this host: identity, state and resource usage, from /proc."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.sampling.live import latest_files
from commprof.sampling.samples import Sample
from commprof.trace.process import start_ticks
from commprof.trace.rank_files.layout import EVENTS_SUFFIX

_PROC: Final = Path("/proc")
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_LONGEST_SAMPLE_S: Final = 1.0  # the longest time for taking a stack on a busy machine; usually a few ms
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class State(StrEnum):
    """The state of a rank's process."""

    RUNS = "runs"
    STOPPED = "stopped"  # by a signal or a debugger
    GONE = "gone"
    ENDED = "ended"  # the rank closed its recording normally
    ELSEWHERE = "elsewhere"  # on another host, where it cannot be checked


class RankProcess(NamedTuple):
    """The process of a rank."""

    rank: int
    pid: int
    start_ticks: int | None = None

    @property
    def name(self) -> str:
        """The name of the process in samples."""
        return f"rank {self.rank}"


class Usage(NamedTuple):
    """The CPU time that a process has used since its start, and its current memory and threads."""

    cpu_ns: int
    rss_bytes: int
    threads: int


def local_ranks(run: Path) -> list[RankProcess]:
    """Return the processes of the ranks of ``run`` that are on this host and have not ended.

    Raises:
        TraceError: the directory cannot be read.
    """
    here = socket.gethostname()
    processes = []
    for identity, stem in latest_files(run):
        begin = _first_line(stem.with_name(stem.name + EVENTS_SUFFIX))
        if begin.get("host") != here:
            continue
        process = RankProcess(identity.rank, identity.pid, begin.get("start_ticks"))
        if state_of(process) not in (State.GONE, State.ENDED):
            processes.append(process)
    return processes


def _first_line(events: Path) -> dict[str, Any]:
    try:
        with events.open("rb") as file:
            row = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) and row.get("kind") == "begin" else {}


def state_of(process: RankProcess, proc: Path = _PROC) -> State:
    """Return whether ``process`` runs, is stopped, or is gone.

    The process is gone if another process has its pid now. A process that a tracer stopped counts as stopped only if
    the stop lasts, because py-spy stops a process briefly to sample its stack.
    """
    letter, until = _letter(process.pid, proc), time.monotonic() + _LONGEST_SAMPLE_S
    while letter == "t" and time.monotonic() < until:
        time.sleep(0.01)
        letter = _letter(process.pid, proc)
    if letter in ("Z", "X"):
        return State.GONE
    if process.start_ticks is not None and start_ticks(process.pid) != process.start_ticks:
        return State.GONE
    return State.STOPPED if letter in ("T", "t") else State.RUNS


def _letter(pid: int, proc: Path) -> str:
    """Return the state of a process (field 3 of its stat file, see proc(5)), or X if the process is gone."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]


def usage_of(pid: int, proc: Path = _PROC) -> Usage | None:
    """Return the usage of process ``pid`` from fields 14, 15, 20 and 24 of its stat file; None if the process is gone.

    The fields are described in proc(5).
    """
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return Usage(
            ticks * 1_000_000_000 // _TICKS_PER_SECOND, int(fields[21]) * _PAGE_BYTES, int(fields[17])
        )
    except (OSError, ValueError, IndexError):
        return None


class ProcessSampler:
    """Samples the CPU time, resident memory and threads of each rank on this host."""

    def __init__(
        self,
        ranks: Callable[[], list[RankProcess]],
        clock: Callable[[], int] = time.perf_counter_ns,
        proc: Path = _PROC,
    ) -> None:
        self._ranks = ranks
        self._clock = clock
        self._proc = proc
        self._before: dict[int, tuple[int, int]] = {}  # pid -> time and CPU time of the last reading, in ns

    def read(self) -> list[Sample]:
        """Return ``rss_bytes``, ``threads`` and ``cpu_percent`` of each rank.

        ``cpu_percent`` is the share of one core since the previous reading. The first reading lacks it.
        """
        samples = []
        for process in self._ranks():
            now, usage = self._clock(), usage_of(process.pid, self._proc)
            if usage is None:
                continue
            before = self._before.get(process.pid)
            self._before[process.pid] = now, usage.cpu_ns
            values: dict[str, float] = {"rss_bytes": usage.rss_bytes, "threads": usage.threads}
            if before is not None and now > before[0]:
                values["cpu_percent"] = 100.0 * (usage.cpu_ns - before[1]) / (now - before[0])
            samples += [Sample("proc", process.name, name, value, now) for name, value in values.items()]
        return samples

    def close(self) -> None:
        """Do nothing, because the sampler has no open resources."""
