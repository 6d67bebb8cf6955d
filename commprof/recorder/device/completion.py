"""Records the completion times of sampled collectives on host backends, as reported by the backend itself.

The end of a wait is the end of the operation only if the program waited until the operation completed. An
operation may also complete while the program computes. For such operations, the future of the handle calls
back. A callback costs 12 us and takes the interpreter's lock on the backend's thread. So commprof requests a
callback only for one in ``every`` of the calls that are sampled anyway (one in 251).

Note [the end of the program]: a callback into an interpreter that is shutting down aborts the process. A group
waits for its operations when it is destroyed, which otherwise happens during the shutdown. So commprof waits
for pending callbacks just before the shutdown.
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

_MOST_REFUSALS: Final = 16  # After this number of consecutive failures, no more callbacks are requested.
_COST_NS: Final = 12_000  # CPU time of requesting and running a callback, in both threads together (measured)
_LONGEST_WAIT: Final = 1800.0  # seconds: gloo's own timeout of an operation
# Seconds in which the backend's thread drops the callback function. This takes the interpreter's lock again.
_LETTING_GO: Final = 0.01
_under_way: Final[dict[int, None]] = {}  # pending callbacks; see Note [the end of the program]
_numbers: Final = itertools.count()


class Completions:
    """Records the completion time of sampled handles.

    Args:
        every: The sampling rate: one in ``every`` handles that are passed to :meth:`sample`. 0 samples no handles.
        clock: The clock of the records, in nanoseconds.
    """

    def __init__(self, every: int, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.every = every
        self.asked = 0
        self._offered = 0
        self._refused = 0
        self._clock = clock

    @property
    def cost_ns(self) -> int:
        """The CPU time that all callbacks have taken, in nanoseconds."""
        return self.asked * _COST_NS

    def sample(self, token: Token, work: Any) -> None:
        """Request the completion time of ``work`` for the record at ``token``, if the handle is sampled.

        The callback refers to the record only. Handles of devices are skipped, because their futures would keep
        memory in use on other streams. Never raises, except for interruptions of the program.
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
            _under_way.pop(number, None)  # first, because the end of the program waits for this entry
            if not isinstance(error, Exception) or is_interruption(error):
                raise
            self._refused += 1  # a backend whose handles have no future


def _teller(number: int, segment: Segment, index: int, clock: Callable[[], int]) -> Callable[[Any], None]:
    """Return a callback that writes the current time into a record. The backend calls it on its own thread."""

    def tell(_: Any) -> None:
        try:
            segment[index] = clock()
        except Exception:
            pass  # Recording has ended, so the record cannot be written any more.
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
