"""Joins operation lines of one thread: the two lines of one call, and the calls of a group.

The COLL line and the CALL line of one call follow each other directly. NCCL launches all operations of a thread
between ``ncclGroupStart`` and the matching ``ncclGroupEnd`` together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commprof.nccl.tables.arrow_columns import Column
from commprof.nccl.tables.op_buffer import CALL, COLL, WHOLE

Numbers = npt.NDArray[np.int64]

# The values that the two lines of one call share.
_SAME: Final = ("op", "sendbuff", "recvbuff", "elements", "datatype", "reduction", "root", "comm", "stream")


class _Last(NamedTuple):
    """The last operation line of a thread so far."""

    row: int
    line: int
    fields: tuple[int, ...] | None


class Twins:
    """Joins the COLL line and the CALL line of each call, block by block."""

    def __init__(self) -> None:
        self._last: dict[int, _Last] = {}

    def forget(self) -> None:
        """Reset the state of all threads, because a new log begins."""
        self._last.clear()

    def join(
        self, columns: Mapping[str, Column], threads: Numbers, first_row: int
    ) -> tuple[Numbers, list[tuple[int, int]]]:
        """Find the twin of each row: the other line of the same call.

        Args:
            columns: The rows of one block, in order.
            threads: The number of the thread of each row; -1 if unknown.
            first_row: The number of the first row in the whole parse.

        Returns:
            The line number of the twin of each row, -1 if there is none. Then pairs of a row of an earlier block and
            the line number of its twin in this block.
        """
        lines = columns["line"].astype(np.int64)
        twins = np.full(len(lines), -1, np.int64)
        if not len(lines):
            return twins, []
        order = np.argsort(threads, kind="stable")
        before, after = order[:-1], order[1:]
        same = (threads[before] == threads[after]) & (threads[before] >= 0)
        same &= (columns["kind"][before] == COLL) & (columns["kind"][after] == CALL)
        same &= (columns["state"][before] == WHOLE) & (columns["state"][after] == WHOLE)
        for name in _SAME:
            same &= columns[name][before] == columns[name][after]
        twins[before[same]], twins[after[same]] = lines[after[same]], lines[before[same]]
        late = []
        begins = np.flatnonzero(np.append(True, threads[before] != threads[after]))
        closes = np.append(begins[1:], len(order)) - 1
        for first, last in zip(order[begins].tolist(), order[closes].tolist(), strict=True):
            thread = int(threads[first])
            known = self._last.get(thread)
            if known and known.fields is not None and known.fields == _fields(columns, first, CALL):
                twins[first] = known.line
                late.append((known.row, int(lines[first])))
            if thread >= 0:
                self._last[thread] = _Last(first_row + last, int(lines[last]), _fields(columns, last, COLL))
        return twins, late


def _fields(columns: Mapping[str, Column], row: int, kind: int) -> tuple[int, ...] | None:
    if columns["kind"][row] != kind or columns["state"][row] != WHOLE:
        return None
    return tuple(int(columns[name][row]) for name in _SAME)


class Groups(NamedTuple):
    """The lines that begin (step 1) and end (step -1) groups: thread, place in the block, and line in the log."""

    threads: Numbers
    places: Numbers
    lines: Numbers
    steps: Numbers


class Launches:
    """Numbers the groups of operations, block by block.

    The number of a group is the line number of the outermost ``ncclGroupStart``.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, int]] = {}  # by thread: nesting depth, number of the launch

    def forget(self) -> None:
        """Reset the state of all threads, because a new log begins."""
        self._open.clear()

    def number(self, threads: Numbers, places: Numbers, groups: Groups) -> Numbers:
        """Return the number of the launch of each row; -1 if the row is in no group.

        Args:
            threads: The number of the thread of each row.
            places: The position of each row in the block.
            groups: The lines that begin and end groups, in order.
        """
        launches = np.full(len(threads), -1, np.int64)
        for thread in {*groups.threads.tolist(), *self._open} - {-1}:
            rows, marks = np.flatnonzero(threads == thread), np.flatnonzero(groups.threads == thread)
            if not len(rows) + len(marks):
                continue
            depth, current = self._open.pop(thread, (0, -1))
            order = np.argsort(np.append(places[rows], groups.places[marks]), kind="stable")
            step = np.append(np.zeros(len(rows), np.int64), groups.steps[marks])[order]
            line = np.append(np.full(len(rows), -1), groups.lines[marks])[order]
            level = depth + np.cumsum(step)
            # An end without a start is ignored, because the log may begin after the start.
            level -= np.minimum(np.minimum.accumulate(level), 0)
            began = (step > 0) & (level == 1)
            number = np.maximum.accumulate(np.where(began, line, current))
            inside = (order < len(rows)) & (level > 0)
            launches[rows[order[inside]]] = number[inside]
            if level[-1] > 0:
                self._open[thread] = (int(level[-1]), int(number[-1]))
        return launches
