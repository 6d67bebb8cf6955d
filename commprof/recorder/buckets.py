"""The gradient buckets that a program publishes: the same ones come back in every step, so each is written once.

A bucket that comes again is a short line with its number, the step and the time. A program whose buckets never come again
pays one full line for each, as for any other row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from commprof.recorder.journal import Journal

_MOST_KNOWN: Final = 4096


class BucketRows:
    """Writes the rows of ``buckets``.

    Args:
        journal: where the lines go.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._next_number = 1

    def write(self, row: Mapping[str, Any], step: int, micro_step: int, time_ns: int) -> None:
        """The bucket that ``row`` describes was flushed in this step at this time."""
        try:
            number = self._number(row)
        except TypeError:  # a program may publish anything, and what is not hashable is not compared
            number = None
        if number is None or type(step) is not int or type(micro_step) is not int:
            moment = {"step": step, "micro_step": micro_step, "time_ns": time_ns}
            self._journal.write("buckets", {**row, **moment})
            return
        line = (
            f'{{"kind":"flush","id":{number},"step":{step},"micro_step":{micro_step},"time_ns":{time_ns}}}\n'
        )
        self._journal.write_line("flush", line.encode())

    def _number(self, row: Mapping[str, Any]) -> int | None:
        """The number of ``row``, which is written when it is new; None when it could not be."""
        key = tuple(row.items())
        number = self._numbers.get(key)
        if number is not None:
            return number
        number, self._next_number = self._next_number, self._next_number + 1
        if not self._journal.write("bucket", {**row, "id": number}):
            return None
        if len(self._numbers) >= _MOST_KNOWN:
            self._numbers.clear()  # numbers go on, so old ones stay right
        self._numbers[key] = number
        return number
