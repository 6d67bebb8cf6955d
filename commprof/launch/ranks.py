"""Starts the processes of a job, waits for all of them, and stops the remaining processes when one fails.

Ranks are ordinary ``python SCRIPT ARGS`` processes. So argv, ``__main__``, ``sys.path``, tracebacks, signals and exit
codes are those of Python. The rank that failed first is the most important one, and a launcher that polls cannot
identify this rank. So each process has a pidfd in one epoll set. The events of the set arrive in the order in which the
processes exited.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from commprof.errors import LaunchError
from commprof.launch.signal_queue import Signal, SignalQueue

GRACE_SECONDS: Final = 5.0
# The same time as in torchrun, because a rank that gets a signal to stop may write a checkpoint first.
STOP_GRACE_SECONDS: Final = 30.0
FORWARDED: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
)
_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SCHEDULERS: Final = (signal.SIGTERM, signal.SIGHUP)  # on these signals programs write checkpoints
_PR_SET_PDEATHSIG: Final = 1
_SI_KERNEL: Final = 0x80  # linux/siginfo.h: sent by the kernel, in this case for the terminal


class Rank(NamedTuple):
    """One process to start. Only one process of a group may read standard input.

    ``output`` is the descriptor to use as standard output and standard error. None means the streams of this process.
    """

    number: int
    command_line: Sequence[str]
    environment: Mapping[str, str]
    reads_stdin: bool = False
    output: int | None = None


class Outcome(NamedTuple):
    """How a job ended.

    ``exit_code`` is the exit code of the rank that failed first (128 + number for a signal), or 0 if no rank failed.
    """

    exit_code: int
    first_failed_rank: int | None
    signal_name: str | None  # the signal that killed the rank that failed first
    stopped_ranks: tuple[int, ...]  # stopped by commprof after another rank had failed
    asked_to_stop: signal.Signals | None = None  # the signal on which commprof and the ranks had to stop
    grace_seconds: float = GRACE_SECONDS  # the time that the other ranks had after the first failure


@contextlib.contextmanager
def signals_held() -> Iterator[Callable[[], bool]]:
    """Block signals, so that the rank groups started within this context receive them.

    The kernel delivers a signal to any thread of the process that does not block the signal. Threads that start within
    this context (of a progress bar, of a table reader) inherit the mask. So every signal stays pending until a rank
    group reads it. Yields a function that returns, between two groups, whether a signal to stop has arrived.
    """
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _watched())
    try:
        # A call with timeout 0 cannot be interrupted.
        yield lambda: signal.sigtimedwait(_STOPPING, 0) is not None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _watched() -> tuple[signal.Signals, ...]:
    """Return the signals that a rank group reads: SIGCHLD, and the signals to forward that are not ignored.

    The kernel keeps a blocked signal pending even if the signal is ignored. Without this exception, a rank group would
    read the SIGHUP that nohup ignores. It would also read the SIGINT that a shell ignores in a background job.
    """
    ignored = {number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN}
    return (*(number for number in FORWARDED if number not in ignored), signal.SIGCHLD)


class RankGroup:
    """The processes of one job. If one process fails, the other processes are stopped.

    Args:
        ranks: The processes to start.
        say: The function that is called with one line of text for the user.
        grace_seconds: The time in seconds between a failure and the SIGTERM to the other processes. It is also the time
            between this SIGTERM and SIGKILL.
        stop_grace_seconds: The time in seconds between a failure and SIGTERM if commprof got SIGTERM or SIGHUP before
            the failure.
        death_signal: The signal that the kernel sends to each process if this process dies for any reason.
        is_command: Whether the only process is a command of the user. The processes that this command started are then
            stopped with it.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        say: Callable[[str], None],
        *,
        grace_seconds: float = GRACE_SECONDS,
        stop_grace_seconds: float = STOP_GRACE_SECONDS,
        death_signal: signal.Signals = signal.SIGKILL,
        is_command: bool = False,
    ) -> None:
        self._ranks = ranks
        self._say = say
        self._grace_seconds = grace_seconds
        self._stop_grace_seconds = stop_grace_seconds
        self._death_signal = death_signal
        self._is_command = is_command
        self._leader = 0  # the process group of the ranks; 0 if the ranks are in the group of this process
        self._shares_terminal = _in_foreground()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[int, int] | None = {} if hasattr(os, "pidfd_open") else None  # pidfd -> rank
        self._signals: SignalQueue | None = None
        self._epoll: select.epoll | None = None
        self._first_failed: tuple[int, int] | None = None  # rank, return code
        self._first_grace = grace_seconds
        self._stop_at: float | None = None
        self._stop_signal = signal.SIGTERM
        self._stopped: list[int] = []
        self._interrupts = 0
        self._asked_to_stop: signal.Signals | None = None
        self._old_mask: set[signal.Signals] = set()

    def start(self) -> None:
        """Start every rank. Until :meth:`wait` returns, only :meth:`wait` receives the signals of this thread.

        Raises:
            LaunchError: a process could not be started. The processes that were already started are killed.
        """
        watched = _watched()
        self._signals = SignalQueue(watched)
        self._epoll = select.epoll()
        self._epoll.register(self._signals.descriptor, select.EPOLLIN)
        self._old_mask = {signal.Signals(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, watched)}
        # If SIGCHLD is ignored, the kernel keeps no exit codes.
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        leader = 0
        for rank in self._ranks:
            try:
                process = self._spawn(rank, leader)
            except OSError as error:
                self._signal_all(signal.SIGKILL)
                self.wait()
                raise LaunchError(f"rank {rank.number} could not be started: {error}") from error
            leader = leader or process.pid
            self._leader = 0 if self._shares_terminal else leader
            self._running[rank.number] = process
            self._watch(rank.number, process.pid)

    @property
    def pids(self) -> frozenset[int]:
        """The ids of the running processes."""
        return frozenset(process.pid for process in self._running.values())

    def _spawn(self, rank: Rank, leader: int) -> subprocess.Popen[bytes]:
        prctl = _prctl()
        parent, death_signal, mask = os.getpid(), int(self._death_signal), self._old_mask - set(_watched())

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if prctl is not None:
                prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        return subprocess.Popen(
            rank.command_line,
            env=dict(rank.environment),
            stdin=None if rank.reads_stdin else subprocess.DEVNULL,
            stdout=rank.output,
            stderr=rank.output,
            # In the foreground of a terminal, the ranks stay in the foreground group, to read the terminal and to get
            # its Ctrl-C. Otherwise they get their own group, so that a signal to commprof's group does not reach them
            # twice.
            process_group=None if self._shares_terminal else leader,
            preexec_fn=prepare,
            # Descriptors may be open for the program: /dev/fd/63 of a shell, the sockets of an MPI (PMI_FD).
            close_fds=False,
        )

    def _watch(self, rank: int, pid: int) -> None:
        assert self._epoll is not None
        if self._pidfds is None:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # kernels before 5.3 have no pidfd, so failures are ordered by rank
            self._forget_pidfds()
            return
        self._pidfds[pidfd] = rank
        self._epoll.register(pidfd, select.EPOLLIN)

    def _unwatch(self, pidfd: int) -> None:
        assert self._epoll is not None
        # Closing the pidfd is not enough, because a child that is about to start may have a copy of the descriptor.
        self._epoll.unregister(pidfd)
        os.close(pidfd)

    def _forget_pidfds(self) -> None:
        for pidfd in self._pidfds or ():
            self._unwatch(pidfd)
        self._pidfds = None

    def wait(self) -> Outcome:
        """Wait until the last rank has exited, and forward signals meanwhile. Return how the job ended."""
        assert self._epoll is not None and self._signals is not None
        try:
            while self._running:
                # Events arrive in the order of the exits. A signal also ends the wait, such as SIGCHLD without pidfds.
                ready = [descriptor for descriptor, _ in self._epoll.poll(self._seconds_to_wait())]
                for received in self._signals.take():
                    if received.number != signal.SIGCHLD:
                        self._forward(received)
                self._collect(ready)
                self._stop_when_due()
            if self._is_command and self._asked_to_stop is not None and self._leader:
                self._stop_left_over(self._asked_to_stop)
        finally:
            self._forget_pidfds()
            self._epoll.close()
            self._signals.close()
            if self._asked_to_stop in _SCHEDULERS:
                # The command ``timeout`` sends its signal twice, to the process and to its group. The second signal
                # must not end this process, because the run is not closed yet.
                signal.signal(self._asked_to_stop, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        return self._outcome()

    def _seconds_to_wait(self) -> float:
        if self._stop_at is None:
            return 1.0
        return min(1.0, max(0.01, self._stop_at - time.monotonic()))

    def _collect(self, ready: Sequence[int]) -> None:
        for rank in self._ended(ready):
            code = self._running.pop(rank).wait()
            if code != 0 and self._first_failed is None:
                self._first_failed = (rank, code)
                if self._asked_to_stop in _SCHEDULERS:
                    self._first_grace = self._stop_grace_seconds
                self._stop_at = time.monotonic() + self._first_grace

    def _ended(self, ready: Sequence[int]) -> list[int]:
        if self._pidfds is None:
            return [rank for rank, process in self._running.items() if process.poll() is not None]
        ended = []
        for pidfd in ready:
            if pidfd in self._pidfds:
                self._unwatch(pidfd)
                ended.append(self._pidfds.pop(pidfd))
        return ended

    def _forward(self, received: Signal) -> None:
        if received.number in _STOPPING and self._asked_to_stop is None:
            self._asked_to_stop = received.number
        if received.number == signal.SIGINT:
            self._interrupts += 1
            # A command also gets the second interrupt, because torchrun must stop its ranks itself.
            if self._interrupts > 1 and not self._is_command:
                self._say("interrupted again: the ranks are killed")
                self._signal_all(signal.SIGKILL)
                return
        # If the ranks share the terminal, a signal of the terminal has already reached them.
        if not (self._shares_terminal and received.code == _SI_KERNEL):
            self._signal_all(received.number)

    def _stop_when_due(self) -> None:
        if self._stop_at is None or not self._running or time.monotonic() < self._stop_at:
            return
        if self._stop_signal == signal.SIGTERM:
            self._stopped = sorted(self._running)
        self._signal_all(self._stop_signal)
        self._stop_signal = signal.SIGKILL
        self._stop_at = time.monotonic() + self._grace_seconds

    def _signal_all(self, number: signal.Signals) -> None:
        if self._is_command and self._leader and number in (signal.SIGINT, signal.SIGKILL):
            # A shell waits for its program, which would not get an interrupt that is sent to the shell only.
            self._signal_group(number)
            return
        for process in self._running.values():
            process.send_signal(number)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._leader, number)

    def _stop_left_over(self, number: signal.Signals) -> None:
        """Stop the processes that the command left in its process group, such as the program of a shell script.

        A signal to the group of this process (from timeout or a batch system) does not reach the command's group.
        """
        assert self._epoll is not None and self._signals is not None
        grace = self._stop_grace_seconds if number in _SCHEDULERS else self._grace_seconds
        deadline = time.monotonic() + grace
        if _members(self._leader):
            self._signal_group(number)
        while left := _members(self._leader):
            if time.monotonic() > deadline:
                pids = ", ".join(map(str, left))
                self._say(f"still running {grace:g} s after {number.name}: processes {pids}")
                return
            self._epoll.poll(0.05)
            for received in self._signals.take():
                if received.number in FORWARDED:
                    self._signal_group(received.number)

    def _outcome(self) -> Outcome:
        if self._first_failed is None:
            return Outcome(0, None, None, (), self._asked_to_stop)
        rank, code = self._first_failed
        killed_by = _signal_name(-code) if code < 0 else None
        exit_code = 128 - code if code < 0 else code
        # The second interrupt killed the ranks, and the shell expects the exit code of an interrupt.
        if self._interrupts > 1 and not self._is_command:
            exit_code = 128 + signal.SIGINT
        return Outcome(
            exit_code, rank, killed_by, tuple(self._stopped), self._asked_to_stop, self._first_grace
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _members(group: int) -> list[int]:
    """Return the processes of process group ``group`` that have not ended.

    Fields 3 and 5 of the stat file of a process are its state and its group (see proc(5)).
    """
    members = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                members.append(int(file.parent.name))
    return sorted(members)


def _in_foreground() -> bool:
    """Return whether this process is in the foreground group of a terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _prctl() -> Callable[..., int] | None:
    with contextlib.suppress(OSError, AttributeError):
        prctl: Callable[..., int] = ctypes.CDLL(None).prctl
        return prctl
    return None
