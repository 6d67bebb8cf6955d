"""Bounds the time that C++ waits for collectives: DDP's reducer at the end of a backward pass, and functions of torch.

No recorded method is called when they wait. But autograd runs the callbacks that were queued during a backward pass in
the order in which they were queued, and the reducer queues its wait after its last bucket. So a callback that is queued
at the first bucket runs just before that wait, and a second one, which the first queues, runs just after it.

Between the two callbacks the thread waits and copies gradients. The waiting time has bounds. The upper bound is the
time in which the thread was on no processor. The lower bound is the time in which it slept: the upper bound minus the
time in which it was ready to run but had no processor. If other threads copy too, or may hold Python's lock, the thread
may have slept for them. Their running time and their waits for a processor are then subtracted as well.

If the collectives are on a device, its stream waits and not the thread. The wait lies between two events, which enclose the
copies too, so its length is an upper bound. When the row is written depends on when the device reaches them.
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
_MOST_OPEN: Final = 64  # backward passes, nested in each other or ended by an exception
_MOST_THREADS: Final = 64  # others of which the times are read
_MOST_WAITING: Final = 512
_SLACK_NS: Final = 10_000  # what reading the clocks takes itself
_graph_task: Final = getattr(torch._C, "_current_graph_task_id", lambda: _NO_TASK)
_running_node: Final = getattr(torch._C, "_current_autograd_node", lambda: None)


class Moment(NamedTuple):
    """The clocks of a thread. ``off_ns``: for how long it was neither working nor waiting, at most; None: not known."""

    wall_ns: int
    cpu_ns: int
    off_ns: int | None


class Stalls:
    """Writes the rows of ``stalls``.

    Args:
        journal: where the lines go.
    """

    def __init__(self, journal: Journal) -> None:
        self.cost_ns = 0
        self._journal = journal
        self._rows: list[dict[str, Any]] = []  # not yet written
        self._issued = 0
        self._since = 0  # the first collective that nobody has waited for, as far as is known
        self._in_functions = 0
        self._open: set[int] = set()  # backward passes

    def issued(self) -> None:
        """C++, or a communication hook, is about to issue a collective for which C++ waits."""
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
        """Be called back at the end of this backward pass."""
        if len(self._open) >= _MOST_OPEN:
            self._open.clear()
        self._open.add(task)
        self._journal.device_times.forget_cpp()
        if _running_node() is not None:
            self._queue(lambda: self._begin(task))
            return
        # Autograd has come to its callbacks: a static graph is reduced only there in its first step, and waited for at once.
        moment = self._now()
        self._queue(lambda: self._end(task, moment))

    def enter(self, detailed: bool = True) -> tuple[int, Moment]:
        """A function of torch begins that may issue collectives and wait for them.

        Args:
            detailed: worth some microseconds more, without which there is no lower bound.
        """
        self._in_functions += 1
        return self._issued, self._now(detailed)

    def leave(self, entered: tuple[int, Moment], place: str) -> None:
        """It has returned or raised."""
        self._in_functions -= 1
        issued, moment = entered
        if self._issued > issued:
            self._add(place, moment.wall_ns, moment, self._now(moment.off_ns is not None))

    def write(self) -> None:
        """Write what was added since the last time."""
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
        """The wait of ``row`` lasted from ``begin_ns`` to ``end_ns`` on a device."""
        times = {"device_begin_ns": begin_ns, "device_end_ns": end_ns}
        bounds = {"exposed_low_ns": 0, "exposed_high_ns": max(0, end_ns - begin_ns)}
        self._journal.write("stalls", {**row, **times, **bounds})

    def _row(self, place: str, since_ns: int, begin_ns: int) -> dict[str, Any]:
        """What is known of a row when the wait begins. ``since_ns``: 0 if it is not known."""
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
    """The kernel's accounts of this process's threads, kept open: opening one takes ten times as long as reading it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._descriptors: dict[int, int] = {}

    def read(self, thread: int) -> tuple[int, int]:
        """:func:`_parsed` of ``thread``.

        Raises:
            OSError, ValueError: this kernel does not say, or the thread has ended.
        """
        descriptor = self._descriptors.pop(thread, None)
        if descriptor is not None:
            try:
                line = os.pread(descriptor, 128, 0)
            except OSError:  # the thread has ended, and another one has its number
                os.close(descriptor)
            else:
                self._descriptors[thread] = descriptor
                return _parsed(line)
        descriptor = self._descriptors[thread] = os.open(
            f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC
        )
        return _parsed(os.pread(descriptor, 128, 0))

    def keep(self, threads: Collection[int]) -> None:
        """Close the accounts of all but ``threads``."""
        for thread in self._descriptors.keys() - threads:
            os.close(self._descriptors.pop(thread))

    def __del__(self) -> None:
        self.keep(())


_thread: Final = threading.local()


def _off_ns() -> int | None:
    """Time in which this thread was ready and found no processor, and what others took for which it may have slept."""
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
    """The threads for which this one may sleep: those that compute with it, and those of Python."""
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
    """Nanoseconds that a thread ran, and that it was ready and waited for a processor."""
    ran, waited, _ = line.split()
    return int(ran), int(waited)
