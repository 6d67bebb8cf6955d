"""Slots for records in a memory-mapped part of a rank's file, and the words that complete the records.

Standard library only.

Note [slots]: the code that takes a slot, packs the record and reads the clock runs once per collective. For this reason
it is also implemented in C (``_slots.c``), where it takes 0.15 us instead of 0.4 us. Both versions have the same
interface.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Final, Protocol

from commprof.compiled import compiled
from commprof.schema import COMMIT, RECORD, STATUSES, Status, record_offset
from commprof.trace.rank_files.layout import ISSUE, TAIL

_NUMBER_WORD: Final = record_offset("pg_seq") // 8
RETURN_WORD: Final = record_offset("return_ns") // 8
WAIT_BEGIN_WORD: Final = record_offset("wait_begin_ns") // 8
WAIT_END_WORD: Final = record_offset("wait_end_ns") // 8
DEVICE_BEGIN_WORD: Final = record_offset("device_begin_ns") // 8
DEVICE_END_WORD: Final = record_offset("device_end_ns") // 8
EXPOSED_WORD: Final = record_offset("exposed_ns") // 8
STATE_WORD: Final = record_offset("phase") // 8
_SIGNATURE_WORD: Final = record_offset("signature") // 8  # The signature is the lower half of this word.
_STATUS_SHIFT: Final = 8 * (record_offset("status") - record_offset("phase"))
_COMPILED_VERSION: Final = 2  # the VERSION of _slots.c that implements the interface of this module


def pack_tail(
    step: int, micro_step: int, coalesce_id: int, phase: int, layer: int, captured: bool = False
) -> bytes:
    """Pack the tail of a record, from ``step`` to the commit word, with the status incomplete.

    The tail is equal in many records. A step or micro-batch number that does not fit its field is clamped.
    """
    status = STATUSES.index(Status.INCOMPLETE)
    return TAIL.pack(_fit(step), _fit(micro_step), coalesce_id, phase, layer, status, captured, COMMIT)


def _fit(number: int) -> int:
    return max(-(1 << 31), min(number, (1 << 31) - 1))


class Words(Protocol):
    """The eight-byte words of records, numbered from the beginning of their segment."""

    def __getitem__(self, index: int) -> int: ...

    def __setitem__(self, index: int, value: int) -> None: ...


class _NoWords:
    """The words of a dropped record."""

    def __getitem__(self, index: int) -> int:
        return 0

    def __setitem__(self, index: int, value: int) -> None:
        return None


_NOTHING: Final[Words] = _NoWords()


class PythonSlots:
    """Slots for records in the first ``size`` bytes of a mapping. If it is None, there are no slots. See Note [slots].

    Attributes:
        end: The size of the slots in bytes.
        words: The words of the records, which stay accessible after the mapping is released. A subclass sets them.
    """

    __slots__ = ("_mapping", "_offsets", "end", "words")

    words: Words

    def __init__(self, mapping: mmap.mmap | None, size: int) -> None:
        self._mapping = mapping
        # Returns each offset once, even if several threads take slots at the same time.
        self._offsets = itertools.count(0, RECORD.size)
        self.end = 0 if mapping is None else size // RECORD.size * RECORD.size

    def take(
        self, issue_ns: int, seq: int, signature: int, tag: int, site: int, thread: int, tail: bytes, /
    ) -> int:
        """Write a record into the next slot. Return the index of its first word, or -1 if no slot is left.

        An ``issue_ns`` of 0 means the current time.
        """
        mapping = self._mapping
        offset = next(self._offsets)
        if offset >= self.end or mapping is None:
            return -1
        ISSUE.pack_into(
            mapping, offset, issue_ns or time.perf_counter_ns(), seq, signature, tag, site, thread, tail
        )
        return offset >> 3

    def stamp(self, index: int, /) -> None:
        """Write the current time in ns into the word at ``index``."""
        self.words[index] = time.perf_counter_ns()

    @property
    def used(self) -> int:
        """The size in bytes of the slots that were taken."""
        return min(count_of(self._offsets), self.end)

    def release(self) -> None:
        """Release the mapping. No slots are left, and ``end`` becomes the number of bytes that were used."""
        self.end = self.used
        self._mapping = None


def _writes_records(module: ModuleType) -> bool:
    """Return whether the slots of ``module`` write the record of the schema, since ``module`` may be outdated."""
    record = (1, 2, 3, 4, 5, 6, bytes(range(1, TAIL.size + 1)))
    mapping = mmap.mmap(-1, mmap.PAGESIZE)
    mapping.write(b"\xff" * mmap.PAGESIZE)
    slots = module.Slots(mapping, mmap.PAGESIZE)
    try:
        indices = [slots.take(*record) for _ in range(2)]
    except ValueError:  # The module expects a tail of a different length.
        return False
    finally:
        slots.release()
    return indices == [0, RECORD.size // 8] and mapping[: 2 * RECORD.size] == 2 * ISSUE.pack(*record)


_compiled: Final = compiled("commprof.trace._slots", _COMPILED_VERSION)
IS_COMPILED: Final = _compiled is not None and _writes_records(_compiled)
if TYPE_CHECKING:
    Slots = PythonSlots
else:
    Slots = _compiled.Slots if IS_COMPILED else PythonSlots


class Segment(Slots):
    """A reserved part of the file or of memory, with slots at the offsets 0, RECORD.size, ... below ``end``.

    ``words`` gives access to the words of the records, even after the mapping is released. Indexing the segment itself
    does the same, with one more call.
    """

    __slots__ = ("map",) if Slots is PythonSlots else ("map", "words")

    def __init__(self, mapping: mmap.mmap | None, size: int, words: Words = _NOTHING) -> None:
        super().__init__(mapping, size)
        self.map = mapping
        self.words: Words = words if mapping is None else memoryview(mapping).cast("q")

    def __getitem__(self, index: int) -> int:
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value

    def let_go(self, words: Words) -> None:
        """Unmap a full segment as soon as no thread is packing a record in the segment.

        From now on, ``words`` gives access to its records.
        """
        self.words, self.map = words, None
        self.release()

    def close(self) -> bool:
        """Unmap the segment at once. Return False if another thread is packing a record in the segment."""
        words, mapping = self.words, self.map
        self.words, self.map = _NOTHING, None
        self.release()
        try:
            if isinstance(words, memoryview):
                words.release()
            if mapping is not None:
                mapping.close()
        except (BufferError, ValueError):
            return False
        return True


# The segment of dropped records.
NO_WORDS: Final = Segment(None, 0)

# The location of a record that will be completed later: its segment, the index of its first word in the segment, and
# whether the begin of its wait must be recorded. (The wait of a synchronous call begins when the call returns.)
Token = tuple[Segment, int, bool]


def mark_raised(token: Token) -> tuple[int, int]:
    """Change the status of a record to ``raised``. Return the signature of the record and its number in its group."""
    words, base, _ = token
    mask = 0xFF << _STATUS_SHIFT
    words[base + STATE_WORD] = (words[base + STATE_WORD] & ~mask) | STATUSES.index(
        Status.RAISED
    ) << _STATUS_SHIFT
    return words[base + _SIGNATURE_WORD] & 0xFFFFFFFF, words[base + _NUMBER_WORD]


def count_of(counter: Iterator[int]) -> int:
    """Return the next number of ``counter`` (an ``itertools.count``) without advancing it.

    The number is parsed from the repr, ``count(5)`` or ``count(0, 104)``, because pickling the counter is deprecated.
    """
    return int(repr(counter)[len("count(") : -1].partition(",")[0])
