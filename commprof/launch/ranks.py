"""Starts the processes of a job, waits for all of them, and stops the others when one fails.

Ranks are ordinary ``python SCRIPT ARGS`` processes, so argv, ``__main__``, ``sys.path``, tracebacks, signals and exit codes
are Python's own. The rank that failed first matters most, and a launcher that polls cannot tell which it was. So each
process has a pidfd in one epoll set, whose events arrive in the order in which the processes exited.
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
STOP_GRACE_SECONDS: Final = 30.0  # as torchrun: a rank that was asked to stop may write a checkpoint first
FORWARDED: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
)
_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SCHEDULERS: Final = (signal.SIGTERM, signal.SIGHUP)  # on these signals programs write checkpoints
_PR_SET_PDEATHSIG: Final = 1
_SI_KERNEL: Final = 0x80  # linux/siginfo.h: sent by the kernel, in this case for the terminal


class Rank(NamedTuple):
    """One process to start. Only one may read standard input. ``output``: a descriptor to use as standard output."""

    number: int
    command_line: Sequence[str]
    environment: Mapping[str, str]
    reads_stdin: bool = False
    output: int | None = None


class Outcome(NamedTuple):
    """How a job ended.

    ``exit_code`` is that of the rank that failed first (128 + number for a signal), 0 if none failed.
    """

    exit_code: int
    first_failed_rank: int | None
    signal_name: str | None  # the signal that killed it
    stopped_ranks: tuple[int, ...]  # stopped by commprof after another rank had failed
    asked_to_stop: signal.Signals | None = None  # the signal that told commprof, and so the ranks, to stop
    grace_seconds: float = GRACE_SECONDS  # how long the others had after the first failure


@contextlib.contextmanager
def signals_held() -> Iterator[Callable[[], bool]]:
    """Block signals, so that the rank groups started within this context receive them.

    A signal to a process goes to any of its threads that does not block it. Threads that start within (of a progress
    bar, of a table reader) inherit the mask, so every signal waits until a rank group reads it. Yields a function that
    tells, between two groups, whether a signal to stop has arrived.
    """
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _watched())
    try:
        yield lambda: signal.sigtimedwait(_STOPPING, 0) is not None  # with timeout 0 it cannot be interrupted
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _watched() -> tuple[signal.Signals, ...]:
    """The signals that a rank group reads: those to forward that are not ignored, and SIGCHLD.

    The kernel keeps a signal that is blocked even if it is ignored. So nohup's SIGHUP, and the SIGINT that a shell ignores
    in a background job, would be read although this process was started to ignore them.
    """
    ignored = {number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN}
    return (*(number for number in FORWARDED if number not in ignored), signal.SIGCHLD)


class RankGroup:
    """The processes of one job: if one fails, the others are stopped.

    Args:
        ranks: the processes to start.
        say: called with one line of text for the person at the terminal.
        grace_seconds: time that the others get to notice a failure, and again after SIGTERM.
        stop_grace_seconds: the first of these times if SIGTERM or SIGHUP has told commprof to stop before that failure.
        death_signal: sent to each process by the kernel if this process dies, whatever the reason.
        is_command: the one process is a command of the user's, whose own processes are stopped with it.
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
        self._leader = 0  # the process group of the ranks; 0 if it is that of this process
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
        """Start every rank. From here until :meth:`wait` returns, only :meth:`wait` receives this thread's signals.

        Raises:
            LaunchError: a process could not be started; those already started are stopped.
        """
        watched = _watched()
        self._signals = SignalQueue(watched)
        self._epoll = select.epoll()
        self._epoll.register(self._signals.descriptor, select.EPOLLIN)
        self._old_mask = {signal.Signals(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, watched)}
        if (
            signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
        ):  # if SIGCHLD were ignored, the kernel would keep no exit codes
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
        """The processes that are running."""
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
            # In the foreground of a terminal, the ranks stay in its process group, to read it and to get its Ctrl-C.
            # Otherwise they get a group of their own, so that a signal to commprof's group does not reach them twice.
            process_group=None if self._shares_terminal else leader,
            preexec_fn=prepare,
            close_fds=False,  # what was opened for the program: /dev/fd/63 of a shell, the sockets of an MPI (PMI_FD)
        )

    def _watch(self, rank: int, pid: int) -> None:
        assert self._epoll is not None
        if self._pidfds is None:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # a kernel before 5.3: then failures are ordered by rank
            self._forget_pidfds()
            return
        self._pidfds[pidfd] = rank
        self._epoll.register(pidfd, select.EPOLLIN)

    def _unwatch(self, pidfd: int) -> None:
        assert self._epoll is not None
        # Closing it is not enough: a child that is about to start may hold it, too.
        self._epoll.unregister(pidfd)
        os.close(pidfd)

    def _forget_pidfds(self) -> None:
        for pidfd in self._pidfds or ():
            self._unwatch(pidfd)
        self._pidfds = None

    def wait(self) -> Outcome:
        """Wait until the last rank has exited; forward signals meanwhile."""
        assert self._epoll is not None and self._signals is not None
        try:
            while self._running:
                # Events come in the order of the exits. A signal ends the wait, too: SIGCHLD, if there are no pidfds.
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
                # timeout sends its signal twice, to the process and to its group. The run has yet to be closed.
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
            # A command gets it, too: torchrun then stops its ranks, which would be left alone without it.
            if self._interrupts > 1 and not self._is_command:
                self._say("interrupted again: the ranks are killed")
                self._signal_all(signal.SIGKILL)
                return
        if not (
            self._shares_terminal and received.code == _SI_KERNEL
        ):  # otherwise the terminal has sent it to them itself
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
            self._signal_group(number)  # a shell waits for its program, which would not get an interrupt
            return
        for process in self._running.values():
            process.send_signal(number)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._leader, number)

    def _stop_left_over(self, number: signal.Signals) -> None:
        """Stop what the command has left in its process group when it ended, such as the program of a shell script.

        A signal to the group of this process (timeout, a batch system) does not reach that group.
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
        if (
            self._interrupts > 1 and not self._is_command
        ):  # the ranks were killed because of it, and the shell expects the code of an interrupt
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
    """The processes of process group ``group`` that have not ended (fields 3 and 5 of their stat files, see proc(5))."""
    members = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                members.append(int(file.parent.name))
    return sorted(members)


def _in_foreground() -> bool:
    """Whether this process is in the foreground group of a terminal."""
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
