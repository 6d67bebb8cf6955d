"""Writes the gradient buckets that a program publishes: they recur in every step, so each is described once.

A recurring bucket is a short line with its number, the step and the time. A program whose buckets never recur writes a
full line for each. All lines are collected until the next step begins and then written together. A write in the middle
of a backward pass, when the recorder's data is in no cache, would take as long as the recording of several collectives.
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
        journal: where the lines go.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._next_number = 1
        self._waiting: list[tuple[int, int, int, int]] = []  # number, step, micro step, time

    def add(self, bucket: hooks.bucket, step: int, micro_step: int, time_ns: int) -> None:
        """``bucket`` was flushed in this step at this time."""
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
        """Write what was added since the last time."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._journal.write_line("flush", b"".join([_line(*each) for each in waiting]))

    def _intern(self, bucket: hooks.bucket) -> None:
        """Give ``bucket`` a number, and write it down where it is new; no number where that cannot be."""
        bucket.interned = None
        try:
            key = tuple(bucket.row.items())
            number = self._numbers.get(key)
        except TypeError:  # a program may publish anything, and what is not hashable is not compared
            return
        if number is None:
            number, self._next_number = self._next_number, self._next_number + 1
            if not self._journal.write("bucket", {**bucket.row, "id": number}):
                return
            if len(self._numbers) >= _MOST_KNOWN:
                self._numbers.clear()  # numbers go on, so old ones stay right
            self._numbers[key] = number
        bucket.interned = (self, number)


def _line(number: int, step: int, micro_step: int, time_ns: int) -> bytes:
    return f'{{"kind":"flush","id":{number},"step":{step},"micro_step":{micro_step},"time_ns":{time_ns}}}\n'.encode()
