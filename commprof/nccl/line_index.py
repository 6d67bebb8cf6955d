"""Where the lines of a block, their heads and their messages stand, found for all lines at once."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from commprof.nccl.fields import Flags, Positions
from commprof.nccl.line_kinds import shape

_LEVEL_LENGTH: Final = len(b" NCCL INFO ")
_EMPTY: Final = np.zeros(1, np.int32)
_FOUR, _FIVE = np.uint64((1 << 32) - 1), np.uint64((1 << 40) - 1)


def _word(text: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(text, "little"))


_LEVELS: Final = np.array([_word(level) for level in (b"INFO", b"CALL", b"WARN", b"TRAC", b"ABOR")])
_INFO, _CALL = _word(b"INFO "), _word(b"CALL ")


class Scratch:
    """Arrays of flags to write to, the same ones each time: fresh memory costs more than the work."""

    def __init__(self) -> None:
        self._flags = np.zeros((2, 0), bool)

    def flags(self, number: int) -> tuple[Flags, Flags]:
        """Two arrays of ``number`` flags, of any content."""
        if self._flags.shape[1] < number:
            self._flags = np.zeros((2, number), bool)
        return self._flags[0, :number], self._flags[1, :number]


class Texts:
    """Texts by number, most of which nobody looks at: they stand in one piece of memory.

    Attributes:
        data: all of them, one behind the other.
        ends: where each of them ends.
    """

    def __init__(self, texts: pa.Array) -> None:
        _, offsets, data = texts.buffers()
        begin, number = texts.offset, len(texts)
        self._offsets = np.frombuffer(offsets, np.int32)[begin : begin + number + 1] if number else _EMPTY
        self.data = data.to_pybytes() if number and data is not None else b""
        self.ends = self._offsets[1:]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> bytes:
        return self.data[self._offsets[number] : self._offsets[number + 1]]

    def take(self, numbers: Positions) -> list[bytes]:
        """Some of the texts."""
        begins, ends = self._offsets[numbers].tolist(), self.ends[numbers].tolist()
        return [self.data[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def shapes(self) -> tuple[list[bytes], Positions]:
        """The distinct shapes of the texts (see :func:`commprof.nccl.line_kinds.shape`), and the number of each text's."""
        if not len(self):
            return [], np.zeros(0, np.int64)
        buffers = [None, pa.py_buffer(self._offsets), pa.py_buffer(shape(self.data))]
        encoded = pa.Array.from_buffers(pa.binary(), len(self), buffers).dictionary_encode()
        texts: list[bytes] = encoded.dictionary.to_pylist()
        return texts, np.frombuffer(encoded.indices.buffers()[1], np.int32)[: len(self)].astype(np.int64)


class LineIndex:
    """The lines of one block. Positions count bytes of ``data``; lines count from 0.

    Attributes:
        size: how many lines there are.
        begins: where each line begins.
        ends: where its newline is.
        returns: whether a return stands in front of it.
        controls: whether it holds control bytes other than that one.
        headless: whether it holds neither a head nor control bytes.
        regular: whether it holds one head, of level INFO or CALL, and no control bytes.
        is_call: whether it is regular and of level CALL.
        messages: where the message of a regular line begins.
    """

    def __init__(self, data: bytes, scratch: Scratch) -> None:
        self.data, self._scratch = data, scratch
        self._bytes = np.frombuffer(data, np.uint8)
        self._words = np.ndarray((max(len(data) - 7, 0),), "<u8", data, strides=(1,))
        self._find_lines()
        self._find_heads()

    def _find_lines(self) -> None:
        """Where lines begin and end (at their newline), which end with a return, and which hold control bytes."""
        flags, _ = self._scratch.flags(len(self._bytes))
        low = np.flatnonzero(np.less(self._bytes, ord(" "), out=flags))
        values = self._bytes[low]
        self.ends = low[values == ord("\n")]
        self.size = len(self.ends)
        self.begins = np.append(0, self.ends[:-1] + 1)[: self.size]
        odd = low[(values != ord("\n")) & (values != ord("\t"))]
        self.returns = np.zeros(self.size, bool)
        if len(odd):
            at_end = (self._bytes[odd] == ord("\r")) & (self._bytes[odd + 1] == ord("\n"))
            self.returns[np.searchsorted(self.ends, odd[at_end])] = True
            odd = odd[~at_end]
        if b"\x7f" in self.data:
            odd = np.append(odd, np.flatnonzero(self._bytes == 0x7F))
        self.controls = np.zeros(self.size, bool)
        self.controls[np.searchsorted(self.ends, odd)] = True

    def _places(self, text: bytes) -> Positions:
        """Where ``text`` stands, of up to 8 bytes, the first two of which are rare together."""
        if not len(self._words):
            return np.zeros(0, np.int64)
        first, second = self._scratch.flags(len(self._words))
        np.equal(self._bytes[: len(first)], text[0], out=first)
        np.equal(self._bytes[1 : len(first) + 1], text[1], out=second)
        at = np.flatnonzero(np.logical_and(first, second, out=first))
        mask = np.uint64((1 << 8 * len(text)) - 1)
        found: Positions = at[self._words[at] & mask == np.uint64(int.from_bytes(text, "little"))]
        return found

    def _lines_of(self, positions: Positions) -> Positions:
        """The lines that hold ``positions``, which are in order."""
        if len(positions) == self.size and bool(
            ((self.begins <= positions) & (positions <= self.ends)).all()
        ):
            return np.arange(self.size)
        return np.searchsorted(self.ends, positions)

    def _find_heads(self) -> None:
        """Which lines have one head and nothing odd, and where its message begins; which lines have no head."""
        places = self._places(b" NCCL ")
        levels = self._words[np.minimum(places + len(b" NCCL "), max(len(self._words) - 1, 0))]
        # Without a level, NCCL is a word of a message. The last bytes of a block are left to a closer look.
        is_head = np.isin(levels & _FOUR, _LEVELS) | (places + len(b" NCCL ") >= len(self._words))
        places, levels = places[is_head], levels[is_head] & _FIVE
        lines = self._lines_of(places)
        times = np.bincount(lines, minlength=self.size)
        self.headless = (times == 0) & ~self.controls
        self.messages = self.begins.copy()
        self.messages[lines] = places + _LEVEL_LENGTH
        self.regular = (times == 1) & ~self.controls & (self.messages <= self.ends)
        self.is_call = np.zeros(self.size, bool)
        self.is_call[lines[levels == _CALL]] = True
        is_info = np.zeros(self.size, bool)
        is_info[lines[levels == _INFO]] = True
        self.regular &= is_info | self.is_call
        self.is_call &= self.regular

    def encode(self, begins: Positions, valid: Flags) -> tuple[Texts, Positions, Positions]:
        """The distinct texts among heads and messages, and the number of each line's (the last of all: none)."""
        encoded = self._segments(begins, valid).dictionary_encode()
        numbers = np.frombuffer(encoded.indices.buffers()[1], np.int32)[: 2 * self.size]
        texts = Texts(encoded.dictionary)
        codes = np.where(valid, numbers, len(texts))
        return texts, codes[::2], codes[1::2]

    def _segments(self, begins: Positions, valid: Flags) -> pa.Array:
        """Head and message of every line, one behind the other, without a copy."""
        offsets = np.empty(2 * self.size + 1, np.int32)
        offsets[:-1:2], offsets[1::2], offsets[-1] = self.begins, begins, len(self.data)
        return self._cut(offsets, valid)

    def _cut(self, offsets: npt.NDArray[np.int32], valid: Flags) -> pa.Array:
        """The block, cut at ``offsets``; the pieces that are not valid are null."""
        # Arrow believes what it is told, and would read other memory.
        if (np.diff(offsets) < 0).any() or offsets[-1] > len(self.data):
            raise AssertionError("a block is to be cut outside of it, or backwards")
        shown = pa.py_buffer(np.packbits(valid, bitorder="little"))
        buffers = [shown, pa.py_buffer(offsets), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)

    def whole_lines(self, rows: Positions) -> Texts:
        """Some lines, with their newlines."""
        offsets = np.zeros(2 * len(rows) + 1, np.int32)
        offsets[1::2], offsets[2::2] = self.begins[rows], self.ends[rows] + 1
        return Texts(self._cut(offsets, np.tile([False, True], len(rows))).drop_null())

    def encode_ends(self, rows: Positions, begins: Positions) -> tuple[list[bytes], Positions]:
        """The distinct texts among the ends of some lines, from ``begins`` on, and the number of each."""
        offsets = np.zeros(2 * len(rows) + 1, np.int32)
        offsets[1::2], offsets[2::2] = begins, self.ends[rows] + 1
        encoded = self._cut(offsets, np.tile([False, True], len(rows))).dictionary_encode()
        numbers = np.frombuffer(encoded.indices.buffers()[1], np.int32)[1 : 2 * len(rows) : 2].astype(
            np.int64
        )
        texts: list[bytes] = encoded.dictionary.to_pylist()
        return texts, numbers
