"""Measures the offset between the clocks of this host and of rank 0: at the start, every minute, and at the end.

A separate thread measures, without collectives, so the training never waits. The end of the recording waits for
a last answer for a bounded time. In a job on one host there is no thread, and nothing is sent.
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
_FIND_SECONDS: Final = 30.0  # timeout for rank 0 to publish its address, which is required
_STORE_SECONDS: Final = 30.0  # time in which rank 0 also answers through the store
_STORE_PATIENCE: Final = 0.25
_LAST_ANSWER_SECONDS: Final = 1.0
_LEAVING_SECONDS: Final = 0.5
_RECENT_NS: Final = 250_000_000
# Variables in which launchers pass the number of ranks on this host, and the number of hosts of the job.
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
        """Write ``row`` into the table ``kind``."""

    def note(self, text: str) -> None:
        """Write a note for the reader of the trace."""


def is_on_one_host(world_size: int, environment: Mapping[str, str]) -> bool:
    """Return whether all ranks are on this host, according to the launcher; False if this is not known."""
    if world_size == 1 or any(environment.get(name) == str(world_size) for name in _LOCAL_SIZES):
        return True
    return any(environment.get(name) == "1" for name in _HOST_COUNTS)


class ClockOffsets:
    """Measures the offset between the clocks of this process and of rank 0, and writes the offset into a log.

    One of the processes that share a clock measures, and the result is valid for all of them. No public method
    raises.

    Args:
        log: The log into which the rows are written.
        meet: A function that returns the meeting in the job's store, or None if other hosts cannot use this
            store. It is called on the thread that measures.
        clock: A function that returns the time of this process's clock in nanoseconds.
        identity: The identity of the clock; None to use :func:`clock_identity`.
        interval: The time between two measurements, in seconds.
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
        self._parting = threading.Event()  # set when the job's store is about to be destroyed
        self._wanted = threading.Event()  # set to request a measurement now
        self._answered = threading.Event()
        self._ended = threading.Event()

    def start(self, rank: int, world_size: int, environment: Mapping[str, str]) -> None:
        """Start to measure in the process ``rank`` of ``world_size``."""
        if rank == REFERENCE_RANK or is_on_one_host(world_size, environment):
            self._share()
        if is_on_one_host(world_size, environment):
            return
        work = self._lead if rank == REFERENCE_RANK else self._follow
        self._thread = threading.Thread(target=self._run, args=(work,), name="commprof clocks", daemon=True)
        self._thread.start()

    def part(self, measure: bool = True) -> None:
        """Stop using the job's store, because the process groups are about to be destroyed.

        Args:
            measure: Whether to measure one more time. This requires that the other ranks are still running.
        """
        began = time.perf_counter_ns()
        self._parting.set()
        if self._server is not None:
            self._server.interrupt()
        if measure:
            self._measure_now()
        self.cost_ns += time.perf_counter_ns() - began

    def finish(self) -> None:
        """Measure one last time at the end of the recording, and disconnect.

        Rank 0 first waits a bounded time for the other ranks to disconnect.
        """
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
        """Close the inherited connections in a forked child. The thread exists only in the parent."""
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
        """Answer the processes of other hosts until all have disconnected."""
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
        """Publish the address of the server, and answer through the store for a limited time.

        Processes that cannot connect to the server ask through the store.
        """
        meeting.publish(Reference(self._identity, own_addresses(), server.port, server.token.hex()))
        until = time.monotonic() + _STORE_SECONDS
        while not self._parting.is_set() and time.monotonic() < until and server.serve(_STORE_PATIENCE):
            if not self._parting.is_set():
                meeting.answer(self._clock, self._parting)

    def _follow(self) -> None:
        """Measure now, at intervals, and on request, until the recording ends."""
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
        """Return a connection to the reference.

        Returns:
            The connection; None if this process needs none, or has already measured through the store.
        """
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
        """Write an offset of zero, because this process reads the reference clock directly."""
        self._write(Offset(self._clock(), 0, 0, 0))

    def _write(self, offset: Offset) -> None:
        self._log.write("clock_offset", {"reference_rank": REFERENCE_RANK, **offset._asdict()})
