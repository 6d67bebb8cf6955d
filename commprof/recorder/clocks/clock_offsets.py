"""Measures the offset of this host's clock to that of rank 0: at the start, every minute, and at the end.

No collective is involved and the training never waits: a separate thread measures. The end of the recording waits for a
last answer for a bounded time. In a job on one host there is no thread, and nothing is sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from commprof.recorder.clocks.clock_exchange import ClockConnection, ClockServer, own_addresses
from commprof.recorder.clocks.clock_meeting import Meeting, Reference
from commprof.recorder.clocks.process_clocks import Exchange, Offset, clock_identity, estimate

REFERENCE_RANK: Final = 0
EXCHANGES: Final = 30
INTERVAL_SECONDS: Final = 60.0
_FIND_SECONDS: Final = 30.0  # how long rank 0 may take to say where it is; without it nothing is measured
_STORE_SECONDS: Final = 30.0  # how long rank 0 answers through the store as well
_STORE_PATIENCE: Final = 0.25
_LAST_ANSWER_SECONDS: Final = 1.0
_LEAVING_SECONDS: Final = 0.5
_RECENT_NS: Final = 250_000_000
# Ranks of this host, and hosts of the job, as launchers tell them.
_LOCAL_SIZES: Final = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
)
_HOST_COUNTS: Final = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES")


class Log(Protocol):
    """Receives offsets and notes; any thread may call it."""

    def write(self, kind: str, row: Mapping[str, object]) -> object:
        """Keep a row."""

    def note(self, text: str) -> None:
        """Write a note for the reader of the trace."""


def is_on_one_host(world_size: int, environment: Mapping[str, str]) -> bool:
    """Whether the launcher says that all ranks are on this host; False also when nobody says anything."""
    if world_size == 1 or any(environment.get(name) == str(world_size) for name in _LOCAL_SIZES):
        return True
    return any(environment.get(name) == "1" for name in _HOST_COUNTS)


class ClockOffsets:
    """Measures the offset of this process's clock to that of rank 0, and writes it down.

    Of the processes that share a clock one asks; the others share its answer. Nothing here raises.

    Args:
        log: where the rows go.
        meet: makes the meeting in the job's store, None where that does not leave this host; called on the thread.
        clock: the clock, and its identity.
    """

    def __init__(
        self,
        log: Log,
        meet: Callable[[], Meeting | None],
        clock: Callable[[], int] = time.perf_counter_ns,
        identity: str | None = None,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self.cost_ns = 0
        self._log = log
        self._meet = meet
        self._clock = clock
        self._identity = identity or clock_identity()
        self._interval = interval
        self._thread: threading.Thread | None = None
        self._server: ClockServer | None = None
        self._connection: ClockConnection | None = None
        self._measured_at_ns = 0
        self._parting = threading.Event()  # the job's store is about to go
        self._wanted = threading.Event()  # a measurement, now
        self._answered = threading.Event()
        self._ended = threading.Event()

    def start(self, rank: int, world_size: int, environment: Mapping[str, str]) -> None:
        """This process is ``rank`` of ``world_size``: begin."""
        if rank == REFERENCE_RANK or is_on_one_host(world_size, environment):
            self._share()
        if is_on_one_host(world_size, environment):
            return
        work = self._lead if rank == REFERENCE_RANK else self._follow
        self._thread = threading.Thread(target=self._run, args=(work,), name="commprof clocks", daemon=True)
        self._thread.start()

    def part(self, measure: bool = True) -> None:
        """Process groups are about to be destroyed: use the job's store no more.

        Args:
            measure: the other ranks are still there: measure a last time.
        """
        began = time.perf_counter_ns()
        self._parting.set()
        if self._server is not None:
            self._server.interrupt()
        if measure:
            self._measure_now()
        self.cost_ns += time.perf_counter_ns() - began

    def finish(self) -> None:
        """Recording ends: measure a last time, and leave. Rank 0 lets the others do so first."""
        thread = self._thread
        if thread is None:
            return
        self.part()
        began = time.perf_counter_ns()
        self._ended.set()
        self._wanted.set()
        if self._server is not None:
            self._server.end()
        thread.join(_LEAVING_SECONDS)
        self.cost_ns += time.perf_counter_ns() - began

    def drop(self) -> None:
        """In a forked child: the thread stayed with the parent, and so must its connections."""
        self._thread = None
        if self._server is not None:
            self._server.close()
        if self._connection is not None:
            self._connection.close()

    def _measure_now(self) -> None:
        thread = self._thread
        if self._connection is None or thread is None or not thread.is_alive():
            return
        if time.perf_counter_ns() - self._measured_at_ns < _RECENT_NS:
            return
        self._answered.clear()
        self._wanted.set()
        self._answered.wait(_LAST_ANSWER_SECONDS)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if not self._parting.is_set():
                self._log.note(
                    f"the clock of this host could not be compared with that of rank {REFERENCE_RANK}: {error}"
                )
        finally:
            self._answered.set()
            self.cost_ns += time.thread_time_ns()

    def _lead(self) -> None:
        """Answer whoever asks, until all have left."""
        meeting = self._meet()
        if meeting is None:
            return
        server = self._server = ClockServer(self._clock)
        try:
            self._invite(server, meeting)
            del meeting
            while server.serve():
                pass
        finally:
            server.close()

    def _invite(self, server: ClockServer, meeting: Meeting) -> None:
        """Say where the server is, and answer those who cannot reach it through the store, for a while."""
        meeting.publish(Reference(self._identity, own_addresses(), server.port, server.token.hex()))
        until = time.monotonic() + _STORE_SECONDS
        while not self._parting.is_set() and time.monotonic() < until and server.serve(_STORE_PATIENCE):
            if not self._parting.is_set():
                meeting.answer(self._clock, self._parting)

    def _follow(self) -> None:
        """Ask now, at intervals, and when somebody wants it, until the end."""
        connection = self._connection = self._introduced()
        if connection is None:
            return
        try:
            while not self._ended.is_set():
                self._keep(connection.ask(EXCHANGES))
                self._answered.set()
                self._wanted.wait(self._interval)
                self._wanted.clear()
        finally:
            connection.close()

    def _introduced(self) -> ClockConnection | None:
        """A connection to the reference; None where this process needs none, or has asked through the store."""
        meeting = self._meet()
        if meeting is None:
            self._share()
            return None
        reference = meeting.find(_FIND_SECONDS, self._parting)
        if reference is None:
            return None
        if reference.clock == self._identity:
            self._share()
            return None
        if not meeting.claim(self._identity):
            return None
        addresses = [*([meeting.host] if meeting.host else []), *reference.addresses]
        token = bytes.fromhex(reference.token)
        try:
            return ClockConnection(addresses, reference.port, token, clock=self._clock)
        except OSError as error:
            exchanges = meeting.ask(self._clock, self._parting)
            if not exchanges:
                raise
            self._keep(exchanges)
            self._log.note(f"clocks were compared through the job's store, and only at the start: {error}")
            return None

    def _keep(self, exchanges: list[Exchange]) -> None:
        self._write(estimate(exchanges))
        self._measured_at_ns = time.perf_counter_ns()

    def _share(self) -> None:
        """This process reads the reference clock itself."""
        self._write(Offset(self._clock(), 0, 0, 0))

    def _write(self, offset: Offset) -> None:
        self._log.write("clock_offset", {"reference_rank": REFERENCE_RANK, **offset._asdict()})
