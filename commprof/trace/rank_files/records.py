"""Reads the records of one rank from its binary file in parts, so that memory use does not grow with their number."""

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
PART: Final = 1 << 18  # number of records that are read at a time

_LARGEST_HEADER: Final = 1 << 20
_LARGE_HOLE: Final = 64 << 20  # The recorder reserves the space that it maps, so its files have no holes.
_BLOCK: Final = 4096  # number of records that fit into the CPU cache
_MOST_TABULATED: Final = 1 << 20  # Smaller numbers are looked up in a table, larger numbers by binary search.
_JUDGED: Final = ("commit", "phase", "layer", "status", "signature", "return_ns")
_INCOMPLETE: Final = STATUSES.index(Status.INCOMPLETE)
_RAISED: Final = STATUSES.index(Status.RAISED)


_NEVER: Final = (1 << 63) - 1

# A half-open interval of issue times in ns. If the end is None, the interval is unbounded.
Window = tuple[int, int | None]
Fields = dict[str, "np.ndarray[Any, Any]"]


class Part(NamedTuple):
    """Consecutive records of a rank: their numbers in issue order, and one array per field."""

    seq: np.ndarray[Any, Any]
    records: Fields


class Tally(NamedTuple):
    """The number of records of one rank by status. ``torn`` counts slots with data but without a complete record."""

    records: int = 0
    torn: int = 0
    raised: int = 0
    incomplete: int = 0


class Numbers:
    """The sorted numbers of interned values, and a lookup of the index of a number."""

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
        """Return the index of each of ``numbers``. The index of an unknown number is ``len(self)``."""
        if self._table is not None:
            tabulated: np.ndarray[Any, Any] = self._table[np.minimum(numbers, len(self._table) - 1)]
            return tabulated
        places = np.searchsorted(self.ordered, numbers)
        places[places == len(self.ordered)] = 0
        places[self.ordered[places] != numbers] = len(self.ordered)
        return places


class Records:
    """The records of one rank file that were complete when :meth:`count` read the file.

    Args:
        path: The ``.records`` file. If the file does not exist, there are no records.
        identity: The rank, attempt and pid that the header must contain.
        signatures: The numbers of the known signatures. A record of an unknown signature is not complete.

    Raises:
        TraceError: The file cannot be read, or its header is damaged or belongs to a different rank.
        SchemaError: An incompatible version wrote the file.
    """

    def __init__(self, path: Path, identity: tuple[int, int, int], signatures: np.ndarray[Any, Any]) -> None:
        self.path = path
        self.totals: dict[str, Any] | None = None
        # The signature and the number of each call that raised. Filled by :meth:`count`.
        self.raised: list[tuple[int, int]] = []
        self._signatures = Numbers(signatures)
        self._first_seq = self._begin = self._slots = 0
        self._has_holes = False
        # For each part: its first slot, and one bit per slot that is set if the record is complete.
        self._whole: list[tuple[int, np.ndarray[Any, Any]]] = []
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
                f"{path} has the records of rank {header.rank} (attempt {header.attempt}, pid {header.pid}), but "
                "the name of another rank's file: restore the original file names"
            )
        self._first_seq, self._begin = header.first_seq, header.header_bytes
        self._slots = max(0, about.st_size - header.header_bytes) // RECORD.size
        self._has_holes = about.st_size - about.st_blocks * 512 > _LARGE_HOLE
        self.totals = parse_totals(head, header.header_bytes)

    def count(self) -> Tally:
        """Read the whole file, find the complete records, and count them by status."""
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
        """Return the last end time of the collectives issued in each window, in ns.

        Windows without collectives are left out.
        """
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
        """Yield the records that :meth:`count` found complete, in issue order, at most :data:`PART` at a time."""
        marked = dict(self._whole)
        for first, raw in self._raw():
            if first not in marked:
                continue  # The part was empty when it was counted, and a process still writes records.
            slots = np.flatnonzero(np.unpackbits(marked[first], count=len(raw)))
            fields = _split(raw, RECORD_DTYPE.names or ())
            if len(slots) < len(raw):
                fields = {name: values[slots] for name, values in fields.items()}
            if len(slots):
                yield Part(self._first_seq + first + slots, fields)

    def _raw(self) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Yield the slots of the file in parts, with the number of the first slot of each part. Skips holes."""
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
                    # If the file became shorter since it was opened, the part is padded to keep its position.
                    if len(raw) < count:
                        raw = np.concatenate([raw, np.zeros(count - len(raw), RECORD_DTYPE)])
                    yield first, raw
                    first += count
        except OSError as error:
            raise TraceError(f"{self.path} cannot be read: {error.strerror}") from None

    def _next_part(self, descriptor: int, first: int) -> int:
        """Return the first slot of the next part with data, at or after slot ``first``."""
        if not self._has_holes:
            return first
        try:
            data = os.lseek(descriptor, self._begin + first * RECORD.size, os.SEEK_DATA)
        except OSError as error:
            # ENXIO means that only a hole follows.
            return self._slots if error.errno == errno.ENXIO else first
        return max(first, (data - self._begin) // RECORD.size // PART * PART)

    def _are_whole(self, fields: Fields) -> np.ndarray[Any, Any]:
        is_whole: np.ndarray[Any, Any] = fields["commit"] == COMMIT
        is_whole &= fields["phase"] < len(PHASES)
        is_whole &= fields["layer"] < len(LAYERS)
        is_whole &= fields["status"] < len(STATUSES)
        is_whole &= self._signatures.places(fields["signature"]) < len(self._signatures)
        return is_whole


def _last_used(first: int, raw: np.ndarray[Any, Any], is_whole: np.ndarray[Any, Any]) -> int:
    """Return the number of the slot after the last slot with data in a part, or 0 if the part has no data."""
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
    """Copy the fields ``names`` of ``raw`` into separate arrays.

    The copy runs block by block, because a record is longer than a cache line.
    """
    fields = {name: np.empty(len(raw), raw.dtype[name]) for name in names}
    for begin in range(0, len(raw), _BLOCK):
        block = raw[begin : begin + _BLOCK]
        for name, values in fields.items():
            values[begin : begin + _BLOCK] = block[name]
    return fields


def completed_status(records: Fields) -> np.ndarray[Any, Any]:
    """Return the status of each record. A record is written as incomplete, and counts as ok if it has a return time."""
    status = records["status"].copy()
    status[(status == _INCOMPLETE) & (records["return_ns"] != 0)] = STATUSES.index(Status.OK)
    return status
