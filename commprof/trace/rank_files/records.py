"""Reads the records of one rank from its binary file part by part, so that memory does not grow with their number."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from commprof.errors import TraceError
from commprof.schema import COMMIT, LAYERS, PHASES, RECORD, RECORD_FIELDS, STATUSES, Status
from commprof.trace.content import open_content
from commprof.trace.rank_files.layout import HEADER, parse_header, parse_totals

RECORD_DTYPE: Final = np.dtype([(item.name, "<" + item.code) for item in RECORD_FIELDS])
assert RECORD_DTYPE.itemsize == RECORD.size
PART: Final = 1 << 18  # records read at a time

_LARGEST_HEADER: Final = 1 << 20
_LARGE_HOLE: Final = 64 << 20  # the recorder reserves what it maps: its own files have no holes
_BLOCK: Final = 4096  # records that fit the cache
_MOST_TABULATED: Final = 1 << 20  # numbers below are looked up in a table, larger ones are searched for
_JUDGED: Final = ("commit", "phase", "layer", "status", "signature", "return_ns")
_INCOMPLETE: Final = STATUSES.index(Status.INCOMPLETE)
_RAISED: Final = STATUSES.index(Status.RAISED)


_NEVER: Final = (1 << 63) - 1

Window = tuple[int, int | None]  # from a moment to before another; null: to the end
Fields = dict[str, "np.ndarray[Any, Any]"]


class Part(NamedTuple):
    """Consecutive records of a rank: their numbers in issue order, and an array for each field."""

    seq: np.ndarray[Any, Any]
    records: Fields


class Tally(NamedTuple):
    """Counts of the records of one rank by status. ``torn``: slots with data but no complete record."""

    records: int = 0
    torn: int = 0
    raised: int = 0
    incomplete: int = 0


class Numbers:
    """The sorted numbers of interned values, and the index of each."""

    def __init__(self, numbers: np.ndarray[Any, Any]) -> None:
        self.ordered = np.sort(numbers.astype(np.int64))
        self._table: np.ndarray[Any, Any] | None = None
        last = int(self.ordered[-1]) if len(numbers) else 0
        if last < _MOST_TABULATED:
            self._table = np.full(last + 2, len(numbers), np.int32)
            self._table[self.ordered] = np.arange(len(numbers), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.ordered)

    def places(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The index of each of ``numbers``; ``len(self)`` for an unknown one."""
        if self._table is not None:
            tabulated: np.ndarray[Any, Any] = self._table[np.minimum(numbers, len(self._table) - 1)]
            return tabulated
        places = np.searchsorted(self.ordered, numbers)
        places[places == len(self.ordered)] = 0
        places[self.ordered[places] != numbers] = len(self.ordered)
        return places


class Records:
    """The records of one rank file that were complete when :meth:`count` read it.

    Args:
        path: the ``.records`` file; one that is not there holds no records.
        signatures: the numbers of the signatures that are known: a record that names another one is not complete.

    Raises:
        TraceError: the file cannot be read, or is damaged beyond its tail.
        SchemaError: another version wrote it.
    """

    def __init__(self, path: Path, identity: tuple[int, int, int], signatures: np.ndarray[Any, Any]) -> None:
        self.path = path
        self.totals: dict[str, Any] | None = None
        # Signature and number of each call that raised; see :meth:`count`.
        self.raised: list[tuple[int, int]] = []
        self._signatures = Numbers(signatures)
        self._first_seq = self._begin = self._slots = 0
        self._has_holes = False
        self._whole: list[tuple[int, np.ndarray[Any, Any]]] = []  # per part: its first slot, one bit a slot
        try:
            with open_content(path) as stream:
                head = stream.read(_LARGEST_HEADER + HEADER.size)
                about = os.fstat(stream.fileno())
        except FileNotFoundError:
            return
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror}") from None
        header = parse_header(head, path)
        written_by = (header.rank, header.attempt, header.pid)
        if written_by != identity:
            raise TraceError(
                f"{path} holds the records of rank {header.rank} (attempt {header.attempt}, pid {header.pid}), not those "
                "that its name says: give the files of the ranks their own names again"
            )
        self._first_seq, self._begin = header.first_seq, header.header_bytes
        self._slots = max(0, about.st_size - header.header_bytes) // RECORD.size
        self._has_holes = about.st_size - about.st_blocks * 512 > _LARGE_HOLE
        self.totals = parse_totals(head, header.header_bytes)

    def count(self) -> Tally:
        """Read the file once: find the complete records, and count them by status."""
        self._whole.clear()
        self.raised.clear()
        records = incomplete = used = 0
        for first, raw in self._raw():
            fields = _split(raw, _JUDGED)
            is_whole = self._are_whole(fields)
            self._whole.append((first, np.packbits(is_whole)))
            status = completed_status(fields)
            records += int(is_whole.sum())
            incomplete += int((is_whole & (status == _INCOMPLETE)).sum())
            raised = raw[np.flatnonzero(is_whole & (status == _RAISED))]
            self.raised += zip(raised["signature"].tolist(), raised["pg_seq"].tolist(), strict=True)
            used = max(used, _last_used(first, raw, is_whole))
        return Tally(records, used - records, len(self.raised), incomplete)

    def last_ends(self, windows: Iterable[Window]) -> dict[Window, int]:
        """The end of the last collective that was issued within each window; windows without any are left out."""
        ordered = sorted(set(windows))
        starts = np.array([start for start, _ in ordered], np.int64)
        stops = np.array([_NEVER if stop is None else stop for _, stop in ordered], np.int64)
        ends = np.zeros(len(ordered), np.int64)
        for part in self.parts() if ordered else ():
            issue = part.records["issue_ns"]
            window_index = np.searchsorted(starts, issue, "right") - 1
            mine = (window_index >= 0) & (issue < stops[window_index])
            for name in ("issue_ns", "return_ns", "wait_end_ns"):
                np.maximum.at(ends, window_index[mine], part.records[name][mine])
        return {window: end for window, end in zip(ordered, ends.tolist(), strict=True) if end}

    def parts(self) -> Iterator[Part]:
        """The records that :meth:`count` found complete, in issue order, at most :data:`PART` at a time."""
        marked = dict(self._whole)
        for first, raw in self._raw():
            if first not in marked:
                continue  # it was empty, and somebody still writes
            slots = np.flatnonzero(np.unpackbits(marked[first], count=len(raw)))
            fields = _split(raw, RECORD_DTYPE.names or ())
            if len(slots) < len(raw):
                fields = {name: values[slots] for name, values in fields.items()}
            if len(slots):
                yield Part(self._first_seq + first + slots, fields)

    def _raw(self) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """The slots of the file, part by part, each with the number of its first slot. Skips holes in the file."""
        if not self._slots:
            return
        try:
            with open_content(self.path) as stream:
                first = 0
                while first < self._slots:
                    first = self._next_part(stream.fileno(), first)
                    count = min(PART, self._slots - first)
                    if count <= 0:
                        return
                    stream.seek(self._begin + first * RECORD.size)
                    data = stream.read(count * RECORD.size)
                    raw = np.frombuffer(data, RECORD_DTYPE, len(data) // RECORD.size)
                    if len(raw) < count:  # cut off since it was opened: the parts stay where they are
                        raw = np.concatenate([raw, np.zeros(count - len(raw), RECORD_DTYPE)])
                    yield first, raw
                    first += count
        except OSError as error:
            raise TraceError(f"{self.path} cannot be read: {error.strerror}") from None

    def _next_part(self, descriptor: int, first: int) -> int:
        """The part at or after slot ``first`` in which the file holds anything."""
        if not self._has_holes:
            return first
        try:
            data = os.lseek(descriptor, self._begin + first * RECORD.size, os.SEEK_DATA)
        except OSError as error:
            return self._slots if error.errno == errno.ENXIO else first  # nothing but a hole follows
        return max(first, (data - self._begin) // RECORD.size // PART * PART)

    def _are_whole(self, fields: Fields) -> np.ndarray[Any, Any]:
        is_whole: np.ndarray[Any, Any] = fields["commit"] == COMMIT
        is_whole &= fields["phase"] < len(PHASES)
        is_whole &= fields["layer"] < len(LAYERS)
        is_whole &= fields["status"] < len(STATUSES)
        is_whole &= self._signatures.places(fields["signature"]) < len(self._signatures)
        return is_whole


def _last_used(first: int, raw: np.ndarray[Any, Any], is_whole: np.ndarray[Any, Any]) -> int:
    """The slot after the last one of a part that holds anything; 0 where none does."""
    if is_whole[-1]:
        return first + len(raw)
    others = np.flatnonzero(~is_whole)
    words = raw[others].view(np.uint8).reshape(len(others), RECORD.size)
    touched = others[words.any(axis=1)]
    last = max(
        int(np.flatnonzero(is_whole)[-1]) if is_whole.any() else -1, int(touched[-1]) if len(touched) else -1
    )
    return first + last + 1 if last >= 0 else 0


def _split(raw: np.ndarray[Any, Any], names: Iterable[str]) -> Fields:
    """The fields of ``raw`` as arrays of their own, a block at a time: a record is longer than a line of the cache."""
    fields = {name: np.empty(len(raw), raw.dtype[name]) for name in names}
    for begin in range(0, len(raw), _BLOCK):
        block = raw[begin : begin + _BLOCK]
        for name, values in fields.items():
            values[begin : begin + _BLOCK] = block[name]
    return fields


def completed_status(records: Fields) -> np.ndarray[Any, Any]:
    """The status of each record: records are packed as incomplete, and a return time makes them ok."""
    status = records["status"].copy()
    status[(status == _INCOMPLETE) & (records["return_ns"] != 0)] = STATUSES.index(Status.OK)
    return status
