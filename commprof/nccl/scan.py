"""One block of log lines, read column by column where its lines are regular and one by one where they are not.

Heads and messages repeat: each distinct one is looked at once. Pure but for its caches: the same block gives the same
result in any process, so blocks can be read side by side. What depends on earlier blocks (which hosts are known,
which communicator an address means) is left to the caller.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from commprof.nccl import lines as nccl_lines
from commprof.nccl.census import Silence, Tally, tally_block
from commprof.nccl.fields import Flags, Positions, Text
from commprof.nccl.heads import HEAD, KnownHosts, Origin
from commprof.nccl.layouts import FIELDS_LENGTH, Tail, Varying, find_coll, read_call, read_coll, read_tail
from commprof.nccl.rows import Rows
from commprof.nccl.spelling import OPERATIONS
from commprof.nccl.topology import Link
from commprof.schema import Op

_MOST_REMEMBERED: Final = 100_000
_NAME: Final = re.compile(rb"(?:\[\d+\] )?(\w+): |nccl(\w+)\(")
_LEVEL_LENGTH: Final = len(b" NCCL INFO ")
_DENSE: Final = 16  # as many numbers for each key are counted faster than keys are sorted
_FOUR, _FIVE = np.uint64((1 << 32) - 1), np.uint64((1 << 40) - 1)


def _word(text: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(text, "little"))


_LEVELS: Final = np.array([_word(level) for level in (b"INFO", b"CALL", b"WARN", b"TRAC", b"ABOR")])
_INFO, _CALL = _word(b"INFO "), _word(b"CALL ")


class Head(NamedTuple):
    """What stands in front of the fields of a regular line: who wrote it, the operation, if it is one, and the level."""

    origin: Origin
    op: Op | None
    is_call: bool


class SlowLine(NamedTuple):
    """A line that was read by itself: its number in the block and its messages.

    ``raw`` is set instead where the messages depend on the hosts that earlier blocks know.
    """

    line: int
    messages: tuple[nccl_lines.Line, ...]
    raw: bytes | None = None


class Scan(NamedTuple):
    """What one block says.

    Attributes:
        lines: how many it has.
        heads: the distinct heads of regular lines, by number.
        operations: columns line, head, tail, opcount, sendbuff, recvbuff and elements, in the order of lines.
        tails: the distinct tails of operation lines, by number.
        slow: lines that were read by themselves and say something, in order.
        hosts: hosts that were seen for certain, with a process: first line, host, pid; in order.
        groups: columns line, head, and step: 1 for ncclGroupStart, -1 for ncclGroupEnd.
        remarks: columns line, head, text and times of lines of topology, tuning and errors: the number of the message
            in ``texts``, and how often the head says it before a communicator begins or ends.
        texts: the distinct messages among them.
        tallies: lines that gave nothing, by kind, but for those that are ``raw``.
    """

    lines: int
    heads: list[Head]
    operations: Rows
    tails: list[Tail]
    slow: list[SlowLine]
    hosts: list[tuple[int, bytes, int]]
    groups: Rows
    remarks: Rows
    texts: list[bytes]
    tallies: dict[str, Tally]


class _Witness(KnownHosts):
    """Notes which hosts lines show, and whether the present line can be read without knowing others."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: list[tuple[int, bytes, int]] = []
        self.pids: set[int] = set()
        self.asked = False
        self._shown: list[tuple[bytes, int]] = []

    def add(self, host: bytes, pid: int) -> None:
        self._shown.append((host, pid))
        self.pids.add(pid)

    def end_of(self, token: bytes, pid: int, any_process: bool) -> bytes | None:
        self.asked = True
        self.pids.add(pid)
        return None

    def read(self, number: int, line: bytes) -> SlowLine:
        """Read line ``number`` of the block."""
        self.asked = False
        self._shown.clear()
        messages = nccl_lines.read_line(line, self)
        if self.asked:
            return SlowLine(number, (), line)
        self.hosts += [(number, host, pid) for host, pid in self._shown]
        return SlowLine(number, tuple(messages))


class Scanner:
    """Reads blocks; remembers what distinct heads and messages mean."""

    def __init__(self, careful: bool = False) -> None:
        """
        Args:
            careful: read every line by itself.
        """
        self._careful = careful
        self._heads: dict[bytes, Head | None] = {}
        self._bodies: dict[bytes, int] = {}
        self._tails: dict[bytes, Tail | None] = {}
        self._flags = np.zeros((2, 0), bool)

    def scan(self, data: bytes) -> Scan:
        """Read a block of whole lines; the last may lack its newline."""
        if data and not data.endswith(b"\n"):
            data += b"\n"
        return _Block(data, self).read(self._careful)

    def flags(self, number: int) -> tuple[Flags, Flags]:
        """Two arrays of ``number`` flags to write to, the same ones each time: fresh memory costs more than the work."""
        if self._flags.shape[1] < number:
            self._flags = np.zeros((2, number), bool)
        return self._flags[0, :number], self._flags[1, :number]

    def head(self, text: bytes) -> Head | None:
        """The head that ``text`` is, up to where the fields begin; None where that takes a closer look."""
        try:
            return self._heads[text]
        except KeyError:
            if len(self._heads) >= _MOST_REMEMBERED:
                self._heads.clear()
            head = self._heads[text] = _read_head(text)
            return head

    def tail(self, text: bytes) -> Tail | None:
        """What the tail ``text`` says; None where that takes a closer look."""
        try:
            return self._tails[text]
        except KeyError:
            if len(self._tails) >= _MOST_REMEMBERED:
                self._tails.clear()
            tail = self._tails[text] = read_tail(text.rstrip(b"\r\n"), text.startswith(b","))
            return tail

    def body(self, text: bytes) -> int:
        """What a message of this text is: one of the numbers below."""
        # Most distinct messages are never seen again, and mean nothing.
        if not nccl_lines.may_speak(text):
            return IGNORED
        meaning = self._bodies.get(text)
        if meaning is None:
            if len(self._bodies) >= _MOST_REMEMBERED:
                self._bodies.clear()
            meaning = self._bodies[text] = _read_body(text.rstrip(b"\r\n"))
        return meaning


IGNORED, MESSAGE, GROUP_START, GROUP_END, REMARK, LINK = range(6)
_NOBODY: Final = Origin(b"-", 0, 0, None, True)


def _read_body(text: bytes) -> int:
    if text == b"ncclGroupStart()":
        return GROUP_START
    if text == b"ncclGroupEnd()":
        return GROUP_END
    if nccl_lines.read_message(_NOBODY, text, b"CALL") is not None:
        return MESSAGE
    message = nccl_lines.read_message(_NOBODY, text, b"INFO")
    if isinstance(message, nccl_lines.RemarkLine):
        return LINK if isinstance(message.record, Link) else REMARK
    return IGNORED if message is None else MESSAGE


def _read_head(text: bytes) -> Head | None:
    found = HEAD.search(text)
    if found is None:
        return None
    name = text[found.end() :]
    op = None
    if name:
        named = _NAME.fullmatch(name)
        op = OPERATIONS.get(named[1] or named[2]) if named else None
        if named is None or op is None or bool(named[2]) != (found["call"] is not None):
            return None
    start = found.start()
    if start and nccl_lines.read_headless(text[:start]):
        return None
    host, pid, tid, device = found["host"], found["pid"], found["tid"], found["device"]
    clean = start == 0 or text[start - 1 : start].isspace()
    origin = Origin(host, int(pid), int(tid), None if device is None else int(device), clean)
    return Head(origin, op, found["call"] is not None)


class _Block:
    """The state of reading one block. Positions count bytes of ``data``; lines and rows count from 0."""

    def __init__(self, data: bytes, scanner: Scanner) -> None:
        self.data, self.scanner = data, scanner
        self.bytes = np.frombuffer(data, np.uint8)
        self._words = np.ndarray((max(len(data) - 7, 0),), "<u8", data, strides=(1,))
        self._find_lines()
        self._find_heads()

    def _find_lines(self) -> None:
        """Where lines begin and end (at their newline), which end with a return, and which hold control bytes."""
        flags, _ = self.scanner.flags(len(self.bytes))
        low = np.flatnonzero(np.less(self.bytes, ord(" "), out=flags))
        values = self.bytes[low]
        self.ends = low[values == ord("\n")]
        self.size = len(self.ends)
        self.begins = np.append(0, self.ends[:-1] + 1)[: self.size]
        odd = low[(values != ord("\n")) & (values != ord("\t"))]
        self.returns = np.zeros(self.size, bool)
        if len(odd):
            at_end = (self.bytes[odd] == ord("\r")) & (self.bytes[odd + 1] == ord("\n"))
            self.returns[np.searchsorted(self.ends, odd[at_end])] = True
            odd = odd[~at_end]
        if b"\x7f" in self.data:
            odd = np.append(odd, np.flatnonzero(self.bytes == 0x7F))
        self.controls = np.zeros(self.size, bool)
        self.controls[np.searchsorted(self.ends, odd)] = True

    def _places(self, text: bytes) -> Positions:
        """Where ``text`` stands, of up to 8 bytes, the first two of which are rare together."""
        if not len(self._words):
            return np.zeros(0, np.int64)
        first, second = self.scanner.flags(len(self._words))
        np.equal(self.bytes[: len(first)], text[0], out=first)
        np.equal(self.bytes[1 : len(first) + 1], text[1], out=second)
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

    def read(self, careful: bool) -> Scan:
        """Sort the lines into those that are read together and those that are read one by one."""
        if careful:
            self.regular[:], self.headless[:] = False, False
        operations, tails, begins = self._find_operations()
        number = len(operations["line"])
        is_operation = np.zeros(self.size, bool)
        is_operation[operations["line"]] = True
        valid = np.repeat(self.regular, 2)
        valid[1::2] &= ~is_operation
        texts, head_codes, body_codes = self._encode(begins, valid)
        heads = {code: self.scanner.head(texts[code]) for code in _distinct(head_codes, len(texts))}
        meaning = np.zeros(len(texts) + 1, np.int8)
        distinct = _distinct(body_codes, len(texts))
        meaning[distinct] = [self.scanner.body(texts[code]) for code in distinct]
        fits = np.zeros((2, len(texts) + 1), bool)
        for code, head in heads.items():
            fits[:, code] = head is not None, head is not None and head.op is not None
        meanings = meaning[body_codes]
        fast = self.regular & fits[0][head_codes] & (is_operation == fits[1][head_codes])
        fast &= meanings != MESSAGE
        witness = _Witness()
        slow = self._read_slowly(~fast & (~self.headless | self._speaking()), witness)
        known = {code: head for code, head in heads.items() if head is not None}
        contested = witness.pids | {head.origin.pid for head in known.values() if head.origin.clean}
        unsure = [c for c, h in known.items() if not h.origin.clean and h.origin.pid in contested]
        if unsure:
            doubtful = fast & np.isin(head_codes, unsure)
            fast &= ~doubtful
            slow = sorted(slow + self._read_slowly(doubtful, witness), key=lambda entry: entry.line)
        first = np.full(len(texts) + 1, self.size)
        first[head_codes[::-1]] = np.arange(self.size)[::-1]
        numbering = np.full(len(texts) + 1, -1, np.int32)
        numbering[list(known)] = np.arange(len(known))
        line_heads = numbering[head_codes]
        if number:
            keep = fast[operations["line"]]
            operations = {name: column[keep] for name, column in operations.items()}
        operations["head"] = line_heads[operations["line"]]
        hosts = witness.hosts + [
            (int(first[code]), head.origin.host, head.origin.pid)
            for code, head in known.items()
            if head.origin.clean
        ]
        remarking = np.flatnonzero(fast & ~self.is_call & (meanings >= REMARK))
        remarks, said = _remarks(
            remarking,
            meanings[remarking] == LINK,
            line_heads[remarking].astype(np.int64),
            body_codes[remarking],
            slow,
        )
        grouping = np.flatnonzero(fast & self.is_call & ((meanings == GROUP_START) | (meanings == GROUP_END)))
        groups: Rows = {
            "line": grouping,
            "head": line_heads[grouping],
            "step": np.where(meanings[grouping] == GROUP_START, 1, -1),
        }
        return Scan(
            self.size,
            list(known.values()),
            operations,
            tails,
            slow,
            sorted(hosts),
            groups,
            remarks,
            [texts[code] for code in said],
            self._tallies([operations["line"], remarking, grouping], fast, body_codes, texts, slow),
        )

    def _tallies(
        self,
        spoken: list[Positions],
        fast: Flags,
        codes: Positions,
        texts: list[bytes],
        slow: list[SlowLine],
    ) -> dict[str, Tally]:
        """The lines that gave nothing, by kind."""
        silent = np.ones(self.size, bool)
        silent[np.concatenate([*spoken, np.array([line.line for line in slow], np.int64)])] = False
        known, rest = np.flatnonzero(silent & fast), silent & ~fast
        silence = Silence(
            known,
            self.is_call[known],
            codes[known],
            texts,
            np.flatnonzero(rest & ~self.headless),
            np.flatnonzero(rest & self.headless),
        )
        read = [(line.line, line.messages) for line in slow if line.raw is None]
        return tally_block(self.data, self.begins, self.ends, self.returns, silence, read)

    def _encode(self, begins: Positions, valid: Flags) -> tuple[list[bytes], Positions, Positions]:
        """The distinct texts among heads and messages, and the number of each line's (the last of all: none)."""
        encoded = self._segments(begins, valid).dictionary_encode()
        numbers = np.frombuffer(encoded.indices.buffers()[1], np.int32)[: 2 * self.size]
        texts: list[bytes] = encoded.dictionary.to_pylist()
        codes = np.where(valid, numbers, len(texts))
        return texts, codes[::2], codes[1::2]

    def _segments(self, begins: Positions, valid: Flags | None = None) -> pa.Array:
        """Head and message of every line, one behind the other, without a copy."""
        offsets = np.empty(2 * self.size + 1, np.int32)
        offsets[:-1:2], offsets[1::2], offsets[-1] = self.begins, begins, len(self.data)
        shown = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
        buffers = [shown, pa.py_buffer(offsets), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(pa.binary(), 2 * self.size, buffers)

    def _find_operations(self) -> tuple[Rows, list[Tail], Positions]:
        """The operation lines among the regular ones: their fields, their tails, and where every line's message begins.

        The message of an operation begins with its fields: its name goes with the head.
        """
        text = Text(self.data)
        last = len(self.data) - FIELDS_LENGTH
        begins = np.where(self.regular, self.messages, self.begins)
        coll_rows = np.flatnonzero(self.regular & ~self.is_call)
        coll_rows, coll_begins = find_coll(text, coll_rows[begins[coll_rows] <= last], begins)
        call_rows = np.flatnonzero(self.regular & self.is_call)
        call_rows = call_rows[begins[call_rows] <= last]
        call_begins = begins[call_rows] + len(b"nccl")
        call_begins += text.length(call_begins, b"(") + 1
        found: list[tuple[Positions, Positions, Varying]] = []
        for rows, at, read in ((coll_rows, coll_begins, read_coll), (call_rows, call_begins, read_call)):
            fields, right = read(text, at)
            chosen = np.flatnonzero(right)
            found.append((rows[chosen], at[chosen], Varying(*(column[chosen] for column in fields))))
        rows = np.concatenate([entry[0] for entry in found])
        order = np.argsort(rows, kind="stable")
        rows, starts = rows[order], np.concatenate([entry[1] for entry in found])[order]
        pairs = zip(*(entry[2] for entry in found), strict=True)
        fields = Varying(*(np.concatenate(pair)[order] for pair in pairs))
        codes, tails = self._encode_tails(rows, fields.tails)
        whole = np.flatnonzero(codes >= 0)
        begins[rows[whole]] = starts[whole]
        columns: Rows = {name: column[whole] for name, column in fields._asdict().items() if name != "tails"}
        columns["tail"], columns["line"] = codes[whole], rows[whole]
        return columns, tails, begins

    def _encode_tails(self, rows: Positions, begins: Positions) -> tuple[Positions, list[Tail]]:
        """The tails of some lines: the number of each, -1 where it is none, and the distinct ones."""
        if not len(rows):
            return rows, []
        offsets = np.zeros(2 * len(rows) + 1, np.int32)
        offsets[1::2], offsets[2::2] = begins, self.ends[rows] + 1
        shown = np.zeros(2 * len(rows), bool)
        shown[1::2] = True
        bits = pa.py_buffer(np.packbits(shown, bitorder="little"))
        buffers = [bits, pa.py_buffer(offsets), pa.py_buffer(self.data)]
        encoded = pa.Array.from_buffers(pa.binary(), 2 * len(rows), buffers).dictionary_encode()
        codes = np.frombuffer(encoded.indices.buffers()[1], np.int32)[1 : 2 * len(rows) : 2]
        read = [self.scanner.tail(text) for text in encoded.dictionary.to_pylist()]
        known = np.array([tail is not None for tail in read])
        numbers = np.where(known, np.cumsum(known) - 1, -1)
        return numbers[codes], [tail for tail in read if tail is not None]

    def _speaking(self) -> Flags:
        """The lines without a head that may say something nevertheless."""
        flags = np.zeros(self.size, bool)
        rows = np.flatnonzero(self.headless & (self.ends > self.begins))
        spans = zip(self.begins[rows].tolist(), (self.ends[rows] + 1).tolist(), strict=True)
        text = b"".join([self.data[begin:end] for begin, end in spans])
        ends = np.cumsum(self.ends[rows] + 1 - self.begins[rows])
        for mark in nccl_lines.HEADLESS_MARKS:
            at = text.find(mark)
            while at >= 0:
                number = int(np.searchsorted(ends, at, "right"))
                flags[rows[number]] = True
                at = text.find(mark, int(ends[number]))
        return flags

    def _read_slowly(self, chosen: Flags, witness: _Witness) -> list[SlowLine]:
        rows = np.flatnonzero(chosen)
        spans = zip(rows.tolist(), self.begins[rows].tolist(), self.ends[rows].tolist(), strict=True)
        read = (witness.read(row, nccl_lines.clean_line(self.data[begin:end])) for row, begin, end in spans)
        return [line for line in read if line.messages or line.raw is not None]


def _remarks(
    lines: Positions, is_link: Flags, heads: Positions, bodies: Positions, slow: list[SlowLine]
) -> tuple[Rows, list[int]]:
    """All remarks; equal links of one head between two events that begin or end a communicator, once, with their number."""
    events = [
        entry.line
        for entry in slow
        if entry.raw is not None
        or any(isinstance(m, nccl_lines.InitLine | nccl_lines.EndLine) for m in entry.messages)
    ]
    said, text = _numbered(bodies)
    stage = np.searchsorted(np.array(events, np.int64), lines)
    key = (stage * (int(heads.max(initial=0)) + 1) + heads) * max(len(said), 1) + text
    repeated = np.flatnonzero(is_link)
    number, first, times = _first_of_each(key[repeated])
    first = np.concatenate([repeated[first], np.flatnonzero(~is_link)])
    times = np.concatenate([times, np.ones(len(first) - len(number), np.int64)])
    order = np.argsort(first)
    first, times = first[order], times[order]
    columns: Rows = {
        "line": lines[first],
        "head": heads[first],
        "text": text[first],
        "times": times,
    }
    return columns, said


def _numbered(codes: Positions) -> tuple[list[int], Positions]:
    """The numbers that occur in ``codes``, and for each code its place among them."""
    occurs = np.bincount(codes) > 0
    return np.flatnonzero(occurs).tolist(), (np.cumsum(occurs) - 1)[codes]


def _first_of_each(keys: Positions) -> tuple[Positions, Positions, Positions]:
    """The distinct keys, where each stands first, and how often it occurs."""
    if not len(keys) or int(keys.max()) > _DENSE * len(keys):
        return np.unique(keys, return_index=True, return_counts=True)
    times = np.bincount(keys)
    first = np.empty(len(times), np.int64)
    first[keys[::-1]] = np.arange(len(keys))[::-1]
    found = np.flatnonzero(times)
    return found, first[found], times[found]


def _distinct(codes: Positions, none: int) -> list[int]:
    """The numbers that occur in ``codes``, but for ``none``."""
    present: list[int] = np.flatnonzero(np.bincount(codes, minlength=none + 1)[:none]).tolist()
    return present
