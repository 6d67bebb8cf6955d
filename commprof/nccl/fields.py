"""Numbers and addresses at many places of a text at once.

Eight characters are one word of 64 bits, and a few operations on words turn digits into a number: for one field of all
lines at once. Every field ends at a character that the caller names. A field that is not exactly what is asked for is
reported, never guessed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

_U: Final = np.uint64
_ZEROS, _HIGH, _ONES = _U(0x3030303030303030), _U(0x8080808080808080), _U(0x0101010101010101)
_FIRST: Final = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)
_TENS: Final = np.array([10**n for n in range(9)], np.uint64)
LONGEST_FIELD: Final = 15


class Field(NamedTuple):
    """One field of all lines: its values, where it ends, and where it is such a field."""

    values: Words
    ends: Positions
    right: Flags


class Text:
    """Bytes from which fields are read at any position that has 32 bytes behind it."""

    def __init__(self, data: bytes) -> None:
        self._words = np.ndarray((max(len(data) - 7, 0),), "<u8", data, strides=(1,))

    def words(self, at: Positions) -> Words:
        """The eight bytes from each position on, the first in the lowest byte."""
        found: Words = self._words[at]
        return found

    def starts_with(self, at: Positions, text: bytes) -> Flags:
        """Whether ``text``, of at most 16 bytes, stands at each position."""
        same: Flags = (self.words(at) & _FIRST[min(len(text), 8)]) == _U(int.from_bytes(text[:8], "little"))
        return same & self.starts_with(at + 8, text[8:]) if len(text) > 8 else same

    def length(self, begin: Positions, stop: bytes) -> Positions:
        """How many characters stand in front of ``stop``, 16 where it does not come so soon."""
        return self._field(begin, _U(stop[0]))[2]

    def decimal(self, begin: Positions, stop: bytes) -> Field:
        """Decimal numbers of 1 to 15 digits, up to the character ``stop``."""
        first, second, length = self._field(begin, _U(stop[0]))
        values, right = _decimal(first, np.minimum(length, 8))
        right &= (length >= 1) & (length <= LONGEST_FIELD)
        if second is not None:
            more = np.maximum(length - 8, 0)
            low, low_right = _decimal(second, more)
            values, right = values * _TENS[more] + low, right & low_right
        return Field(values, begin + length, right)

    def hexadecimal(self, begin: Positions, stop: bytes) -> Field:
        """Numbers of 1 to 15 lower-case hexadecimal digits, up to the character ``stop``."""
        first, second, length = self._field(begin, _U(stop[0]))
        values, right = _hexadecimal(first, np.minimum(length, 8))
        right &= (length >= 1) & (length <= LONGEST_FIELD)
        if second is not None:
            more = np.maximum(length - 8, 0)
            low, low_right = _hexadecimal(second, more)
            values, right = (values << (more * 4).astype(np.uint64)) | low, right & low_right
        return Field(values, begin + length, right)

    def pointer(self, begin: Positions, stop: bytes) -> Field:
        """Pointers as ``%p`` prints them: ``0x`` and digits, not all 0, or ``(nil)``, which is 0."""
        field = self.hexadecimal(begin + 2, stop)
        right = field.right & self.starts_with(begin, b"0x") & (field.values != 0)
        nil = np.flatnonzero(~right)
        nil = nil[self.starts_with(begin[nil], b"(nil)" + stop)]
        field.values[nil], field.ends[nil], right[nil] = 0, begin[nil] + len(b"(nil)"), True
        return Field(field.values, field.ends, right)

    def _field(self, begin: Positions, stop: np.uint64) -> tuple[Words, Words | None, Positions]:
        """Up to 16 characters from each position on, and how many of them stand in front of ``stop``."""
        first = self.words(begin)
        length = _index(first, stop)
        long = length == 8
        if not long.any():
            return first, None, length
        second = self.words(begin + 8)
        return first, second, length + np.where(long, _index(second, stop), 0)


def _index(words: Words, byte: np.uint64) -> Positions:
    """The place of the first ``byte`` in each word, 8 where there is none."""
    other = words ^ (byte * _ONES)
    marks = ((other - _ONES) & ~other & _HIGH) >> _U(7)
    # The lowest mark minus one has as many ones, at the ends of bytes, as there are bytes below the mark.
    below = (marks & (~marks + _U(1))) - _U(1)
    return (((below & _ONES) * _ONES) >> _U(56)).astype(np.int64)


def _decimal(words: Words, length: Positions) -> tuple[Words, Flags]:
    """The first ``length`` (0 to 8) characters of each word as a decimal number, and whether they are digits."""
    digits = (words ^ _ZEROS) << ((8 - length) * 8).astype(np.uint64)
    right = ((digits + _U(0x7676767676767676)) | digits) & _HIGH == 0
    digits = (digits * _U(10) + (digits >> _U(8))) & _U(0x00FF00FF00FF00FF)
    digits = (digits * _U(100) + (digits >> _U(16))) & _U(0x0000FFFF0000FFFF)
    return (digits * _U(10_000) + (digits >> _U(32))) & _U(0xFFFFFFFF), right


def _hexadecimal(words: Words, length: Positions) -> tuple[Words, Flags]:
    """The first ``length`` (0 to 8) characters of each word as a hexadecimal number, and whether they are digits."""
    bits = (length * 8).astype(np.uint64)
    text = (words << (_U(64) - bits)) | (_ZEROS >> bits)
    is_letter = (text >> _U(6)) & _ONES
    low = text & _U(0x0F0F0F0F0F0F0F0F)
    # 0 to 9 stand at 0x30, a to f at 0x61: the high half tells which, the low half must fit it.
    right = (text & _U(0xF0F0F0F0F0F0F0F0)) == _ZEROS + is_letter * _U(0x30)
    right &= ((low + _U(0x7676767676767676) + is_letter * _U(3)) | (low - is_letter)) & _HIGH == 0
    digits = low + is_letter * _U(9)
    digits = ((digits << _U(4)) | (digits >> _U(8))) & _U(0x00FF00FF00FF00FF)
    digits = ((digits << _U(8)) | (digits >> _U(16))) & _U(0x0000FFFF0000FFFF)
    return ((digits << _U(16)) | (digits >> _U(32))) & _U(0xFFFFFFFF), right
