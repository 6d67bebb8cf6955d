"""Writes a rank's two files from inside the training process. Standard library only.

Records are written directly into a shared mapping of the file. A record is safe as soon as it is packed, because the
kernel keeps the page if the process is killed. Space is reserved with ``posix_fallocate`` before it is mapped.
Otherwise a store into a hole of a full file system would cause a SIGBUS, which no except clause can handle. On file
systems that cannot reserve space, records are written with ``pwrite``.

A full segment is unmapped, so a long recording needs no more memory than a short one. If a record of an unmapped
segment is completed later, the words are written to the file.

Once a file is open, no error here raises into the caller. Instead, writing stops, dropped records are counted, and
``stopped_reason`` gives the reason.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from commprof.program_exceptions import pass_on
from commprof.schema import RECORD
from commprof.trace.rank_files.layout import (
    EVENTS_SUFFIX,
    ISSUE,
    RECORDS_SUFFIX,
    TOTALS_OFFSET,
    RankFile,
    new_header,
    pack_totals,
)
from commprof.trace.rank_files.segments import NO_WORDS, Segment

PAGE: Final = mmap.ALLOCATIONGRANULARITY
# A segment has whole pages and whole records, so that records follow one another without gaps.
SEGMENT_UNIT: Final = math.lcm(PAGE, RECORD.size)
FIRST_SEGMENT_BYTES: Final = 256 << 10
LARGEST_SEGMENT_BYTES: Final = 1 << 20

_WORD: Final = struct.Struct("<q")
_CANNOT_RESERVE: Final = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV}


class _FiledWords:
    """The words from offset ``start`` in a part of the file that is not mapped."""

    __slots__ = ("_file", "_start")

    def __init__(self, file: RecordFile, start: int) -> None:
        self._file = file
        self._start = start

    def __getitem__(self, index: int) -> int:
        return self._file.read_word(self._start + index * _WORD.size)

    def __setitem__(self, index: int, value: int) -> None:
        self._file.write_word(self._start + index * _WORD.size, value)


class Spill(Protocol):
    """The destination of records beyond the size limit of the records file."""

    def allows_records(self, size: int) -> bool:
        """Return whether the file may grow to ``size`` bytes."""

    def next_segment(self) -> Segment:
        """Return a segment in memory, which is used instead of a next segment of the file."""


class RecordFile:
    """The ``.records`` file of one rank.

    The hot path takes slots of ``segment``. If no slot is left, it calls :meth:`append`, which grows the file, writes
    the record with ``pwrite``, or counts a dropped record. Once ``spill`` does not allow the file to grow, records go
    to the segments of ``spill`` and not to the file.
    """

    def __init__(
        self, stem: Path, identity: RankFile, first_seq: int = 0, spill: Spill | None = None
    ) -> None:
        self.path = stem.with_name(stem.name + RECORDS_SUFFIX)
        self._spill = spill
        self._spills = False
        self.lost = 0
        self.stopped_reason: str | None = None
        self._lock = threading.RLock()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._newest: Segment | None = None  # the segment that was mapped last
        self._grown = 0  # how often the file was grown
        self._full_bytes = 0  # bytes of the segments before the newest one
        self._written = 0
        self._writes_through = False
        self._end = PAGE
        self.segment = NO_WORDS
        self.on_segment: Callable[[], None] = _ignore  # called after a new segment is opened
        header = new_header(identity, PAGE, first_seq).pack()
        try:
            os.pwrite(self._descriptor, header.ljust(PAGE, b"\0"), 0)
        except OSError as error:
            self.stop(_reason("write", error))
        else:
            self._grow()

    def append(self, *fields: Any) -> tuple[Segment, int]:
        """Store one record if the open segment has no free slot. Return its segment and the index of its first word.

        Args:
            fields: The arguments of :meth:`Segment.take`, with the issue time.
        """
        with self._lock:
            while self.stopped_reason is None and not self._writes_through:
                segment = self.segment
                base = segment.take(*fields)
                if base >= 0:
                    return segment, base
                self._grow()
            if self._writes_through:
                return self._write_through(fields)
            self.lost += 1
            return NO_WORDS, 0

    def _write_through(self, fields: tuple[int | bytes, ...]) -> tuple[Segment, int]:
        offset = self._end + self._written * RECORD.size
        if self._spill is not None and not self._spill.allows_records(offset + RECORD.size):
            self._writes_through = False
            self._spills = True
            return self.append(*fields)
        if not self._write(ISSUE.pack(*fields), offset):
            self.lost += 1
            return NO_WORDS, 0
        self._written += 1
        return Segment(None, 0, _FiledWords(self, offset)), 0

    def read_word(self, offset: int) -> int:
        """Return the eight bytes at ``offset`` of the file as a number, or 0 if they cannot be read."""
        try:
            value: int = _WORD.unpack(os.pread(self._descriptor, _WORD.size, offset))[0]
        except (OSError, struct.error):
            return 0
        return value

    def write_word(self, offset: int, value: int) -> None:
        """Write ``value`` as the eight bytes at ``offset`` of the file, to complete a record."""
        self._write(_WORD.pack(value), offset)

    def _write(self, data: bytes, offset: int) -> bool:
        """Write ``data`` at ``offset``. If the write fails or is cut short, stop recording and return False."""
        try:
            done = os.pwrite(self._descriptor, data, offset)
        except OSError as error:
            pass_on(error)
            self.stop(_reason("write", error))
            return False
        if done != len(data):
            self.stop(f"a write of {len(data)} bytes stopped after {done}: the disk is probably full")
            return False
        return True

    def _grow(self) -> None:
        wanted = FIRST_SEGMENT_BYTES << self._grown
        size = -(-min(wanted, LARGEST_SEGMENT_BYTES) // SEGMENT_UNIT) * SEGMENT_UNIT
        if self._spill is not None:
            size = self._allowed(self._spill, size)
            if not size:
                self._spills = True
                self._open_segment(self._spill.next_segment())
                return
        try:
            os.posix_fallocate(self._descriptor, self._end, size)
            # One write allocates all pages. One page fault per page at the first access costs four times as much.
            os.pwrite(self._descriptor, bytes(size), self._end)
            mapping = mmap.mmap(self._descriptor, size, offset=self._end)
        except OSError as error:
            pass_on(error)
            if error.errno in _CANNOT_RESERVE:
                self._writes_through = True
            else:
                self.stop(_reason("reserve", error))
            self._open_segment(NO_WORDS)
            return
        full, newest = self._newest, Segment(mapping, size)
        full_bytes = 0 if full is None else full.end
        filed = _FiledWords(self, self._end - full_bytes)
        # These statements make no calls, so an exception of a signal handler is raised before or after all of them.
        self._newest = self.segment = newest
        self._full_bytes += full_bytes
        self._end += size
        self._grown += 1
        self.on_segment()
        if full is not None:
            full.let_go(filed)

    def _allowed(self, spill: Spill, size: int) -> int:
        """Return by how many bytes the file may grow: at most ``size``, in whole units. 0 means that records spill."""
        while size and (self._spills or not spill.allows_records(self._end + size)):
            size = size // 2 // SEGMENT_UNIT * SEGMENT_UNIT
        return size

    def end_step(self) -> None:
        """Open a new segment for the records of the next step if records go to memory."""
        with self._lock:
            if self._spill is not None and self._spills and self.stopped_reason is None:
                self._open_segment(self._spill.next_segment())

    def _open_segment(self, segment: Segment) -> None:
        self.segment = segment
        self.on_segment()

    def stop(self, reason: str) -> None:
        """Stop recording. Further records are counted in ``lost``. The first ``reason`` is kept."""
        if self.stopped_reason is None:
            self.stopped_reason = reason
        self._writes_through = False
        self._open_segment(NO_WORDS)

    @property
    def spills(self) -> bool:
        """Whether further records go to memory instead of the file."""
        return self._spills

    @property
    def kept(self) -> int:
        """The number of records in the file."""
        used = 0 if self._newest is None else self._newest.used
        return self._written + (self._full_bytes + used) // RECORD.size

    def close(self, totals: Mapping[str, Any] | None = None) -> None:
        """Write the totals into the first page, truncate the unused tail, and close the file."""
        end = self._end
        if self._newest is not None and not self._written:
            end -= self._newest.end - self._newest.used
        try:
            # If another thread is packing a record, truncating the file would cause a SIGBUS in that thread.
            if self._unmap() and end != self._end:
                os.ftruncate(self._descriptor, end)
            if totals is not None:
                os.pwrite(self._descriptor, pack_totals(totals, PAGE - TOTALS_OFFSET), TOTALS_OFFSET)
        except OSError:
            pass  # The tail of zeros stays. No reader treats zeros as records.
        self._close_descriptor()

    def drop(self) -> None:
        """Close the file without changing its content, as a forked child does."""
        self._unmap()
        self._close_descriptor()

    def _unmap(self) -> bool:
        self.stop("recording ended")
        return self._newest is None or self._newest.close()

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError:
                pass


def _ignore() -> None:
    return None


def _reason(what: str, error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, "unknown error")
    return f"could not {what} space in the trace: {error.strerror or error} ({code})"


# One encoder for all lines: json.dumps creates a new one at each call, which takes longer than encoding most rows.
_encode: Final = json.JSONEncoder(separators=(",", ":"), default=str).encode


def encode_row(kind: str, row: Mapping[str, Any]) -> bytes:
    """Encode a row of ``kind`` as a line of the events file."""
    return _encode({"kind": kind, **row}).encode() + b"\n"


class EventFile:
    """The ``.events`` file of one rank: JSON lines, each written by a single ``write``."""

    def __init__(self, stem: Path) -> None:
        self.path = stem.with_name(stem.name + EVENTS_SUFFIX)
        self.stopped_reason: str | None = None
        self.lost = 0
        self.size = 0
        self._lock = threading.RLock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)

    def write(self, kind: str, row: Mapping[str, Any]) -> bool:
        """Append one line. If it cannot be written completely, return False and write no further line."""
        return self.write_line(encode_row(kind, row))

    def write_line(self, line: bytes) -> bool:
        """Append one or several encoded lines, like :meth:`write`."""
        with self._lock:
            if self.stopped_reason is not None:
                self.lost += 1
                return False
            try:
                done = os.write(self._descriptor, line)
            except OSError as error:
                pass_on(error)
                self.stopped_reason = _reason("write", error)
            else:
                self.size += done
                if done == len(line):
                    return True
                self.stopped_reason = (
                    f"a write of {len(line)} bytes stopped after {done}: the disk is probably full"
                )
            self.lost += 1
            return False

    def close(self) -> None:
        """Close the file without changing its content. This is safe in a forked child, too."""
        if self.stopped_reason is None:
            self.stopped_reason = "recording ended"
        if self._descriptor >= 0:
            try:
                os.close(self._descriptor)
            except OSError:
                pass
            self._descriptor = -1
