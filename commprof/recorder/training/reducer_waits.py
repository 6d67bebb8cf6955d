"""Bounds the time that C++ waits for collectives: DDP's reducer at the end of a backward pass, and functions of torch.

No recorded method is called for these waits. Autograd runs the callbacks that are queued during a backward pass in
queue order, and the reducer queues its wait after its last bucket. A callback that is queued at the first bucket
therefore runs just before the wait. This callback queues a second callback, which runs just after the wait.

Between the two callbacks the thread waits and copies gradients, so only bounds of the waiting time are known. The upper
bound is the time in which the thread was on no processor. The lower bound is the time in which the thread slept: the
upper bound minus the time in which the thread was ready to run but had no processor. If other threads also copy, or may
hold Python's lock, the thread may have slept for these threads. Their running time and their waits for a processor are
then also subtracted.

If the collectives are on a device, the stream of the device waits instead of the thread. Two events enclose the wait
and the copies, so the time between the events is an upper bound. The row is written after the device has reached both
events.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import Variable

from commprof import hooks
from commprof.program_exceptions import pass_on
from commprof.recorder.process.journal import Journal

BACKWARD: Final = "backward"
_NO_TASK: Final = -1
_MOST_OPEN: Final = 64  # open backward passes, which are nested or ended with an exception
_MOST_THREADS: Final = 64  # threads of the process whose times are read
_MOST_WAITING: Final = 512  # rows that are not yet written
_SLACK_NS: Final = 10_000  # the time that reading the clocks takes
_graph_task: Final = getattr(torch._C, "_current_graph_task_id", lambda: _NO_TASK)
_running_node: Final = getattr(torch._C, "_current_autograd_node", lambda: None)


class Moment(NamedTuple):
    """The clocks of a thread at one point in time, in ns.

    Attributes:
        wall_ns: The time of ``time.perf_counter_ns``.
        cpu_ns: The CPU time of the thread.
        off_ns: The total time that does not count as waiting although the thread was not running, see
            :func:`_off_ns`; None if it is not known.
    """

    wall_ns: int
    cpu_ns: int
    off_ns: int | None


class Stalls:
    """Writes the rows of ``stalls``.

    Args:
        journal: The journal that receives the rows.
    """

    def __init__(self, journal: Journal) -> None:
        self.cost_ns = 0
        self._journal = journal
        self._rows: list[dict[str, Any]] = []  # rows that are not yet written
        self._issued = 0
        self._since = 0  # the time of the first collective for which no wait is known yet; 0 if there is none
        self._in_functions = 0
        self._open: set[int] = set()  # the ids of the backward passes that are followed

    def issued(self) -> None:
        """Register that C++ or a communication hook is about to issue a collective for which C++ waits."""
        self._issued += 1
        if self._in_functions:
            return
        try:
            if not self._since:
                self._since = time.perf_counter_ns()
            task = _graph_task()
            if task != _NO_TASK and task not in self._open:
                self._follow(task)
        except Exception as error:
            self._journal.fault(error)

    def _follow(self, task: int) -> None:
        """Queue the callbacks that enclose the wait at the end of this backward pass."""
        if len(self._open) >= _MOST_OPEN:
            self._open.clear()
        self._open.add(task)
        self._journal.device_times.forget_cpp()
        if _running_node() is not None:
            self._queue(lambda: self._begin(task))
            return
        # Autograd is already running its callbacks. In its first step, a static graph is reduced in a callback, and the
        # reducer waits immediately.
        moment = self._now()
        self._queue(lambda: self._end(task, moment))

    def enter(self, detailed: bool = True) -> tuple[int, Moment]:
        """Begin a function of torch that may issue collectives and wait for them.

        Args:
            detailed: Whether to spend some microseconds on the times that a lower bound requires. Otherwise the lower
                bound is 0.

        Returns:
            The state for :meth:`leave`.
        """
        self._in_functions += 1
        return self._issued, self._now(detailed)

    def leave(self, entered: tuple[int, Moment], place: str) -> None:
        """End the function of torch, which has returned or raised; write a row if it issued collectives.

        Args:
            entered: The result of :meth:`enter`.
            place: The value of the column ``place``.
        """
        self._in_functions -= 1
        issued, moment = entered
        if self._issued > issued:
            self._add(place, moment.wall_ns, moment, self._now(moment.off_ns is not None))

    def write(self) -> None:
        """Write the rows that were added since the last call."""
        rows, self._rows = self._rows, []
        for row in rows:
            self._journal.write("stalls", row)

    def _queue(self, callback: Any) -> None:
        Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]

    def _begin(self, task: int) -> None:
        try:
            row = self._row(BACKWARD, self._since, time.perf_counter_ns())
            end_on_device = self._journal.device_times.begin_cpp_wait(
                lambda *times: self._add_device(row, *times)
            )
            if end_on_device is None:
                moment = self._now()
                self._queue(lambda: self._end(task, moment))
            else:
                self._queue(lambda: self._end_on_device(task, row, end_on_device))
        except Exception as error:
            self._journal.fault(error)

    def _end(self, task: int, begun: Moment) -> None:
        try:
            self._open.discard(task)
            self._add(BACKWARD, self._since, begun, self._now())
            self._since = 0
        except Exception as error:
            self._journal.fault(error)

    def _end_on_device(self, task: int, row: dict[str, Any], end: Callable[[], None]) -> None:
        try:
            self._open.discard(task)
            self._since = 0
            row["end_ns"] = time.perf_counter_ns()
            end()
        except Exception as error:
            self._journal.fault(error)

    def _add_device(self, row: dict[str, Any], begin_ns: int, end_ns: int) -> None:
        """Write ``row`` for a wait that lasted from ``begin_ns`` to ``end_ns`` on a device."""
        times = {"device_begin_ns": begin_ns, "device_end_ns": end_ns}
        bounds = {"exposed_low_ns": 0, "exposed_high_ns": max(0, end_ns - begin_ns)}
        self._journal.write("stalls", {**row, **times, **bounds})

    def _row(self, place: str, since_ns: int, begin_ns: int) -> dict[str, Any]:
        """Return the columns of a row that are known when the wait begins. ``since_ns`` is 0 if it is not known."""
        return {
            "step": hooks.position.step,
            "place": place,
            "since_ns": min(since_ns or begin_ns, begin_ns),
            "begin_ns": begin_ns,
        }

    def _add(self, place: str, since_ns: int, begun: Moment, ended: Moment) -> None:
        wall = ended.wall_ns - begun.wall_ns
        high = min(max(0, wall - (ended.cpu_ns - begun.cpu_ns)), wall)
        low = 0
        if begun.off_ns is not None and ended.off_ns is not None:
            low = min(max(0, high - max(0, ended.off_ns - begun.off_ns) - _SLACK_NS), high)
        self._rows.append(
            {
                **self._row(place, since_ns, begun.wall_ns),
                "end_ns": ended.wall_ns,
                "exposed_low_ns": low,
                "exposed_high_ns": high,
            }
        )
        if len(self._rows) >= _MOST_WAITING:
            self.write()

    def _now(self, detailed: bool = True) -> Moment:
        began = time.perf_counter_ns()
        off = _off_ns() if detailed else None
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        self.cost_ns += wall - began
        return Moment(wall, cpu, off)


class _Accounts:
    """The kernel's ``schedstat`` files of this process's threads.

    The files stay open, because opening a file takes ten times as long as reading it.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._descriptors: dict[int, int] = {}

    def read(self, thread: int) -> tuple[int, int]:
        """Return the times of ``thread``, in the form of :func:`_parsed`.

        Raises:
            OSError, ValueError: The kernel does not provide the times, or the thread has ended.
        """
        descriptor = self._descriptors.pop(thread, None)
        if descriptor is not None:
            try:
                line = os.pread(descriptor, 128, 0)
            except OSError:  # the thread has ended, and a new thread has its number
                os.close(descriptor)
            else:
                self._descriptors[thread] = descriptor
                return _parsed(line)
        descriptor = self._descriptors[thread] = os.open(
            f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC
        )
        return _parsed(os.pread(descriptor, 128, 0))

    def keep(self, threads: Collection[int]) -> None:
        """Close the files of all threads except ``threads``."""
        for thread in self._descriptors.keys() - threads:
            os.close(self._descriptors.pop(thread))

    def __del__(self) -> None:
        self.keep(())


_thread: Final = threading.local()


def _off_ns() -> int | None:
    """Return the total time (ns) that does not count as waiting although this thread was not running.

    This includes the time in which this thread was ready to run but had no processor. It also includes the running time
    of all threads for which this thread may have slept, and their waits for a processor. None if the times cannot be
    read.
    """
    try:
        accounts: _Accounts | None = getattr(_thread, "accounts", None)
        if accounts is None or accounts.pid != os.getpid():  # a forked child has other threads
            accounts = _thread.accounts = _Accounts()
        own = threading.get_native_id()
        others = _others(own)
        accounts.keep({own, *others})
        _, waited = accounts.read(own)
        return waited + sum(sum(accounts.read(thread)) for thread in others)
    except (OSError, ValueError, _TooManyError) as error:
        pass_on(error)
        return None


class _TooManyError(Exception):
    pass


def _others(own: int) -> list[int]:
    """Return the threads for which this thread may sleep: threads that compute with it, or else threads of Python."""
    if torch.get_num_threads() > 1:
        threads = [int(task) for task in os.listdir("/proc/self/task")]  # noqa: PTH208 - twice as fast
    elif threading.active_count() > 1:
        named = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
        threads = [thread.native_id for thread in named if thread.native_id is not None and thread.is_alive()]
    else:
        return []
    if len(threads) > _MOST_THREADS:
        raise _TooManyError
    return [thread for thread in threads if thread != own]


def _parsed(line: bytes) -> tuple[int, int]:
    """Return the time that a thread ran, and the time that it was ready and waited for a processor, both in ns."""
    ran, waited, _ = line.split()
    return int(ran), int(waited)
