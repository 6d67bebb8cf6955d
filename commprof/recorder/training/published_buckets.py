"""Writes the gradient buckets that a program publishes. They recur in every step, so each bucket is described once.

Each flush of a described bucket is a short line with the bucket's number, the step and the time. If the buckets of a
program never recur, each flush requires a full line. The short lines are collected and written together when the next
step begins. A write in the middle of a backward pass, when the recorder's data is in no cache, would take as long as
the recording of several collectives.
"""

from __future__ import annotations

from typing import Any, Final

from commprof import hooks
from commprof.recorder.process.journal import Journal

_MOST_KNOWN: Final = 4096
_MOST_WAITING: Final = 512


class BucketRows:
    """Writes the rows of ``buckets``.

    Args:
        journal: The journal that receives the lines.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._next_number = 1
        self._waiting: list[tuple[int, int, int, int]] = []  # (number, step, micro-batch, time in ns)

    def add(self, bucket: hooks.bucket, step: int, micro_step: int, time_ns: int) -> None:
        """Register a flush of ``bucket`` in this step at this time."""
        interned = bucket.interned
        if interned is None or interned[0] is not self:
            self._intern(bucket)
            interned = bucket.interned
        if interned is None or type(step) is not int or type(micro_step) is not int:
            moment = {"step": step, "micro_step": micro_step, "time_ns": time_ns}
            self._journal.write("buckets", {**bucket.row, **moment})
            return
        self._waiting.append((interned[1], step, micro_step, time_ns))
        if len(self._waiting) >= _MOST_WAITING:
            self.write()

    def write(self) -> None:
        """Write the lines that were added since the last call."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._journal.write_line("flush", b"".join([_line(*each) for each in waiting]))

    def _intern(self, bucket: hooks.bucket) -> None:
        """Assign a number to ``bucket`` and describe it if it is new. Assign none if this is not possible."""
        bucket.interned = None
        try:
            key = tuple(bucket.row.items())
            number = self._numbers.get(key)
        except TypeError:  # the program published a value that is not hashable and cannot be compared
            return
        if number is None:
            number, self._next_number = self._next_number, self._next_number + 1
            if not self._journal.write("bucket", {**bucket.row, "id": number}):
                return
            if len(self._numbers) >= _MOST_KNOWN:
                self._numbers.clear()  # the numbering continues, so old numbers remain valid
            self._numbers[key] = number
        bucket.interned = (self, number)


def _line(number: int, step: int, micro_step: int, time_ns: int) -> bytes:
    return f'{{"kind":"flush","id":{number},"step":{step},"micro_step":{micro_step},"time_ns":{time_ns}}}\n'.encode()
