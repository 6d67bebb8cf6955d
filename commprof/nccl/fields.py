"""Numbers out of text, many at a time: fields of a buffer of bytes, given by where they begin and end.

Eight characters are read as one 64-bit word and turned into a number with a few operations on words, for all fields
at once. A field that is not exactly what is asked for is reported, never guessed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

_U: Final = np.uint64
_ZEROS, _HIGH, _ONES = _U(0x3030303030303030), _U(0x8080808080808080), _U(0x0101010101010101)
_LEFT: Final = np.array([0, *((1 << 64) - (1 << (64 - 8 * n)) for n in range(1, 9))], np.uint64)
_FIRST: Final = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)
_PAD: Final = 16


class Text:
    """Bytes from which fields are read at any position."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        padded = np.full(len(data) + 2 * _PAD, ord("\n"), np.uint8)
        padded[_PAD:-_PAD] = data
        self.data = data
        self._words = np.ndarray((len(padded) - 7,), "<u8", padded.data, strides=(1,))

    def words(self, at: Positions) -> Words:
        """The eight bytes from each position on, the first in the lowest byte."""
        found: Words = self._words[at + _PAD]
        return found

    def starts_with(self, at: Positions, text: bytes) -> Flags:
        """Whether ``text``, of at most 16 bytes, stands at each position."""
        same: Flags = (self.words(at) & _FIRST[min(len(text), 8)]) == _U(int.from_bytes(text[:8], "little"))
        return same & self.starts_with(at + 8, text[8:]) if len(text) > 8 else same

    def decimal(self, begin: Positions, end: Positions, longest: int) -> tuple[npt.NDArray[np.int64], Flags]:
        """Decimal numbers of 1 to ``longest`` (at most 16) digits, and where the fields are such numbers."""
        length = end - begin
        right = (length >= 1) & (length <= longest)
        low, low_right = _decimal_word(self.words(end - 8), length)
        right &= low_right
        if longest > 8 and bool((length > 8).any()):
            high, high_right = _decimal_word(self.words(end - 16), length - 8)
            low, right = low + high * _U(100_000_000), right & high_right
        return low.astype(np.int64), right

    def hexadecimal(self, begin: Positions, end: Positions, longest: int) -> tuple[Words, Flags]:
        """Numbers of 1 to ``longest`` (at most 16) lower-case hexadecimal digits, and where the fields are such."""
        length = end - begin
        right = (length >= 1) & (length <= longest)
        low, low_right = _hexadecimal_word(self.words(end - 8), length)
        right &= low_right
        if longest > 8 and bool((length > 8).any()):
            high, high_right = _hexadecimal_word(self.words(end - 16), length - 8)
            low, right = low | (high << _U(32)), right & high_right
        return low, right

    def pointer(self, begin: Positions, end: Positions) -> tuple[Words, Flags]:
        """Pointers as ``%p`` prints them: ``0x`` and digits without leading zeros, or ``(nil)``, which is 0."""
        value, right = self.hexadecimal(begin + 2, end, 16)
        right &= self.starts_with(begin, b"0x") & ~self.starts_with(begin + 2, b"0")
        nil = (end - begin == 5) & self.starts_with(begin, b"(nil)")
        return np.where(nil, _U(0), value), right | nil


def _decimal_word(word: Words, length: Positions) -> tuple[Words, Flags]:
    """The last ``length`` (clipped to 0..8) characters of each word as a decimal number."""
    keep = _LEFT[np.clip(length, 0, 8)]
    digits = (word ^ _ZEROS) & keep
    right = ((digits + _U(0x7676767676767676)) | digits) & _HIGH == 0
    digits = (digits * _U(10) + (digits >> _U(8))) & _U(0x00FF00FF00FF00FF)
    digits = (digits * _U(100) + (digits >> _U(16))) & _U(0x0000FFFF0000FFFF)
    return (digits * _U(10_000) + (digits >> _U(32))) & _U(0xFFFFFFFF), right


def _hexadecimal_word(word: Words, length: Positions) -> tuple[Words, Flags]:
    """The last ``length`` (clipped to 0..8) characters of each word as a hexadecimal number."""
    keep = _LEFT[np.clip(length, 0, 8)]
    text = (word & keep) | (_ZEROS & ~keep)
    is_letter = (text >> _U(6)) & _ONES
    low = text & _U(0x0F0F0F0F0F0F0F0F)
    # 0 to 9 stand at 0x30, a to f at 0x61: the high half tells which, the low half must fit it.
    right = (text & _U(0xF0F0F0F0F0F0F0F0)) == _ZEROS + is_letter * _U(0x30)
    right &= ((low + _U(0x7676767676767676) + is_letter * _U(3)) | (low - is_letter)) & _HIGH == 0
    digits = low + is_letter * _U(9)
    digits = ((digits << _U(4)) | (digits >> _U(8))) & _U(0x00FF00FF00FF00FF)
    digits = ((digits << _U(8)) | (digits >> _U(16))) & _U(0x0000FFFF0000FFFF)
    return ((digits << _U(16)) | (digits >> _U(32))) & _U(0xFFFFFFFF), right
