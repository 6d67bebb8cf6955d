"""Completion times of a sample of collectives on host backends, reported by the backend itself.

The end of a wait is the end of the operation only if the program waited that long. For operations that complete while the
program computes, the future of the handle calls back. That costs 12 us and takes the interpreter's lock on the backend's
thread, so it is done for one in ``every`` of the calls that are sampled anyway (one in 251).

Note [the end of the program]: a callback into an interpreter that is shutting down aborts the process. A group waits for its
operations when it is destroyed, which otherwise happens during the shutdown. So pending callbacks are awaited just before.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections.abc import Callable
from typing import Any, Final

from commprof.program_exceptions import is_interruption
from commprof.recorder.device.device_timeline import Operation
from commprof.trace.rank_files.segments import DEVICE_END_WORD, NO_WORDS, Segment, Token

_MOST_REFUSALS: Final = 16  # in a row, after which a backend's handles are not asked again
_COST_NS: Final = 12_000  # CPU time that asking and being called back take, both threads together (measured)
_LONGEST_WAIT: Final = 1800.0  # seconds: what gloo itself gives an operation
# Seconds for the backend's thread to drop the function that has called back, which takes that lock once more.
_LETTING_GO: Final = 0.01
_under_way: Final[dict[int, None]] = {}  # callbacks that have not come; see Note [the end of the program]
_numbers: Final = itertools.count()


class Completions:
    """Records the completion time of sampled handles.

    Args:
        every: sample one in ``every`` handles that :meth:`sample` gets; 0: none.
        clock: nanoseconds, the clock of the records.
    """

    def __init__(self, every: int, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.every = every
        self.asked = 0
        self._offered = 0
        self._refused = 0
        self._clock = clock

    @property
    def cost_ns(self) -> int:
        """CPU time that all of it has taken."""
        return self.asked * _COST_NS

    def sample(self, token: Token, work: Any) -> None:
        """Let ``work`` write its completion time into the record at ``token``, if it is sampled. Never raises.

        The handle gets a function that refers to the record only. Handles of devices are skipped: their futures would hold
        memory on streams of their own.
        """
        segment, base, is_async = token
        if not self.every or work is None or not is_async or segment is NO_WORDS:
            return
        if isinstance(segment, Operation):
            return
        self._offered += 1
        if (self._offered - 1) % self.every or self._refused >= _MOST_REFUSALS:
            return
        number = next(_numbers)
        try:
            future = work.get_future()
            _under_way[number] = None
            future.add_done_callback(_teller(number, segment, base + DEVICE_END_WORD, self._clock))
            self.asked += 1
            self._refused = 0
        except BaseException as error:
            _under_way.pop(number, None)  # first: the end of the program awaits what is there
            if not isinstance(error, Exception) or is_interruption(error):
                raise
            self._refused += 1  # a backend whose handles have no future


def _teller(number: int, segment: Segment, index: int, clock: Callable[[], int]) -> Callable[[Any], None]:
    """What writes the time into a record when it is called, on a thread of the backend's."""

    def tell(_: Any) -> None:
        try:
            segment[index] = clock()
        except Exception:
            pass  # recording has ended, and the record cannot be written to any more
        finally:
            _under_way.pop(number, None)

    return tell


def _await_callbacks() -> None:
    deadline = time.monotonic() + _LONGEST_WAIT
    pause = 0.001
    try:
        while _under_way and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if pause > 0.001:
            time.sleep(_LETTING_GO)
    except KeyboardInterrupt:
        pass


atexit.register(_await_callbacks)
os.register_at_fork(after_in_child=_under_way.clear)
