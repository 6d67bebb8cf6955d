"""Scans the lines of a log, block by block, with the compiled scanner (``_scanner.c``) or with the line reader.

The line reader is the reference (module ``grammar.lines``). It reads all lines if the scanner is not compiled.
Otherwise the scanner finds the regular lines, and each distinct head, message and tail of an operation line is read
only once. The line reader then reads only the other lines. The caller resolves everything that depends on earlier
blocks: which hosts are known, and which communicator an address refers to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from commprof.compiled import compiled
from commprof.nccl.grammar import lines as nccl_lines
from commprof.nccl.grammar.lexicon import (
    GROUP_END,
    GROUP_START,
    IGNORED,
    LINK,
    MESSAGE,
    OPERATION,
    REMARK,
    RESERVED,
    Head,
    Lexicon,
    Tail,
)
from commprof.nccl.grammar.line_prefix import KnownHosts
from commprof.nccl.sources import Block, read_block
from commprof.nccl.tables.bincount import first_of_each, numbered
from commprof.nccl.tables.census import Example, Tallies, Tally, example_of, headless_example
from commprof.nccl.tables.op_buffer import Rows

_VERSION: Final = 1  # the version of _scanner.c that this module needs
MODULE: Final[ModuleType | None] = compiled("commprof.nccl._scanner", _VERSION)

# The compiled scanner discards its numbered texts when they exceed this number of bytes.
_MOST_REMEMBERED: Final = 16 << 20
# Ray (unless RAY_DEDUP_LOGS=0) and syslog write these texts in a line that replaces several similar lines.
_REPEATED: Final = re.compile(rb"\[repeated (\d{1,9})x across cluster\]|message repeated (\d{1,9}) times")
_REPEATED_MARKS: Final = (b"x across cluster]", b"message repeated ")
Flags = npt.NDArray[np.bool_]
_Tally = Callable[
    [bytes, npt.NDArray[np.int32], npt.NDArray[np.int8]], list[tuple[int, int, tuple[int, ...]]]
]


class SlowLine(NamedTuple):
    """A line that the line reader read.

    Attributes:
        line: The number of the line in the block, from 0.
        messages: The messages of the line.
        raw: The text of the line if its messages depend on hosts in earlier blocks. In this case ``messages`` is empty,
            and the caller must read the line again.
    """

    line: int
    messages: tuple[nccl_lines.Line, ...]
    raw: bytes | None = None


class Scan(NamedTuple):
    """The contents of one block.

    Attributes:
        lines: The number of lines in the block.
        heads: The distinct heads of regular lines, by number.
        operations: The operation lines among the regular lines, in the order of lines. The columns are line, head,
            tail, opcount, sendbuff, recvbuff and elements.
        tails: The distinct tails of operation lines, by number.
        slow: The lines that the line reader read and that have messages or must be read again, in order.
        hosts: The hosts that were identified with certainty, with a process: first line, host, pid; in order.
        groups: The lines that begin or end groups. The columns are line, head and step, which is 1 for ncclGroupStart
            and -1 for ncclGroupEnd.
        remarks: The lines about topology, tuning and errors. The columns are line, head, text and times. ``text`` is
            the number of the message in ``texts``. ``times`` is the number of lines with the same head and message
            before a communicator begins or ends.
        texts: The distinct messages of ``remarks``.
        tallies: The counts of lines by kind. Lines of kind ``READ`` and lines with ``raw`` are not counted.
        repeated: For each line that replaces several similar lines, the number of repetitions.
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
    repeated: tuple[int, ...] = ()


class Scanner(Protocol):
    """The interface of the two scanners, which read the blocks of a parse in order."""

    def look(self, data: bytes) -> Any:
        """Do the part of the work on a block that can run in another thread, one block at a time."""

    def read(self, data: bytes, seen: Any) -> Scan:
        """Return the contents of the block. ``seen`` is the result of :meth:`look` for this block."""


def new_scanner(careful: bool = False) -> Scanner:
    """Return the compiled scanner, or the line scanner if ``careful`` is set or the compiled one is not available."""
    return LineScanner() if careful or MODULE is None else CompiledScanner(MODULE)


def scan_blocks(blocks: Iterable[Block], careful: bool = False) -> Iterator[Scan]:
    """Yield the scans of ``blocks`` in order.

    A thread calls :meth:`Scanner.look` for the next block while the caller uses the scan of the current block.
    """
    scanner = new_scanner(careful)

    def look(block: Block) -> tuple[bytes, Any]:
        data = read_block(block)
        return data, scanner.look(data)

    with ThreadPoolExecutor(1) as thread:
        coming = None
        for block in blocks:
            seen = None if coming is None else coming.result()
            coming = thread.submit(look, block)
            if seen is not None:
                yield scanner.read(*seen)
        if coming is not None:
            yield scanner.read(*coming.result())


def _may_repeat(text: bytes) -> bool:
    return any(mark in text for mark in _REPEATED_MARKS)


def _repetitions(data: bytes) -> tuple[int, ...]:
    return tuple(int(ray or syslog) for ray, syslog in _REPEATED.findall(data))


class _Witness(KnownHosts):
    """Collects the hosts in the lines of a block, and finds lines that depend on the hosts of earlier blocks."""

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
        """Read line ``number`` of the block, whose cleaned text is ``line``."""
        self.asked = False
        self._shown.clear()
        messages = nccl_lines.read_line(line, self)
        if self.asked:
            return SlowLine(number, (), line)
        self.hosts += [(number, host, pid) for host, pid in self._shown]
        return SlowLine(number, tuple(messages))


_NOTHING: Final = np.zeros(0, np.int64)
_NO_ROWS: Final[dict[str, Rows]] = {
    "operations": dict.fromkeys(("line", "opcount", "elements", "head", "tail"), _NOTHING)
    | dict.fromkeys(("sendbuff", "recvbuff"), _NOTHING.astype(np.uint64)),
    "groups": dict.fromkeys(("line", "head", "step"), _NOTHING),
    "remarks": dict.fromkeys(("line", "head", "text", "times"), _NOTHING),
}


class LineScanner:
    """The scanner that reads every line with the line reader."""

    def look(self, data: bytes) -> None:
        """See :class:`Scanner`."""

    def read(self, data: bytes, seen: None) -> Scan:
        """See :class:`Scanner`."""
        del seen
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        witness, tallies, slow = _Witness(), Tallies(), []
        for number, raw in enumerate(lines):
            entry = witness.read(number, nccl_lines.clean_line(raw))
            if entry.messages or entry.raw is not None:
                slow.append(entry)
            if entry.raw is None:
                tallies.add_line(raw, entry.messages, number)
        return Scan(
            lines=len(lines), heads=[], tails=[], texts=[], slow=slow, hosts=witness.hosts,
            tallies=tallies.tallies(), repeated=_repetitions(data), **_NO_ROWS,
        )  # fmt: skip


class _Seen(NamedTuple):
    """The result of the compiled scanner for a block. See ``scan`` in ``_scanner.c``."""

    lines: bytes
    operations: bytes
    texts: list[bytes]
    forgot: bool


class CompiledScanner:
    """The scanner that reads regular lines by the numbers that the compiled scanner assigns to texts."""

    def __init__(self, module: ModuleType) -> None:
        self._compiled, self._tally = module.Scanner(), module.tally
        self._lexicon = Lexicon()
        # Whether any line so far replaced several lines. Blocks are searched for repetitions only if it is set.
        self._repeats = False

    def look(self, data: bytes) -> _Seen:
        """See :class:`Scanner`."""
        forgot = self._compiled.size > _MOST_REMEMBERED
        if forgot:
            self._compiled.forget()
        lines, operations, texts = self._compiled.scan(data)
        return _Seen(lines, operations, texts, forgot)

    def read(self, data: bytes, seen: _Seen) -> Scan:
        """See :class:`Scanner`."""
        if seen.forgot:
            self._lexicon = Lexicon()
        self._lexicon.learn(seen.texts)
        block = _Block(data, seen, self._lexicon)
        scan = block.read(self._tally)
        self._repeats = self._repeats or block.repeats or any(map(_may_repeat, seen.texts))
        return scan._replace(repeated=_repetitions(data)) if self._repeats else scan


class _Block:
    """Reads one block. Lines and rows are numbered from 0."""

    def __init__(self, data: bytes, seen: _Seen, lexicon: Lexicon) -> None:
        self.data, self.lexicon = data, lexicon
        lines = np.frombuffer(seen.lines, np.int32).reshape(-1, 5)
        self.size = len(lines)
        self.lines = lines
        self.head, self.text = lines[:, 3].astype(np.int64), lines[:, 4].astype(np.int64)
        self.operations = np.frombuffer(seen.operations, np.int64).reshape(-1, 5)
        self.witness, self.tallies = _Witness(), Tallies()
        self.repeats = False

    def read(self, tally: _Tally) -> Scan:
        """Return the scan of the block. Lines whose texts are not all known go to the line reader."""
        lexicon = self.lexicon
        meanings = lexicon.meanings[self.text]
        closer = (meanings == MESSAGE) | (lexicon.meanings[self.head] == MESSAGE)
        slow = self._read_lines(closer)
        first = self._first_lines()
        contested = self.witness.pids | {
            lexicon.heads[n].origin.pid for n in first if lexicon.heads[n].origin.clean
        }
        unsure = [
            n for n in first if not lexicon.heads[n].origin.clean and lexicon.heads[n].origin.pid in contested
        ]
        if unsure:
            doubtful = np.isin(self.head, unsure) & ~closer
            closer |= doubtful
            slow = sorted(slow + self._read_lines(doubtful), key=lambda entry: entry.line)
        meanings[closer] = MESSAGE
        # Several texts may have equal heads, because RCCL prints ranks before an operation.
        heads: dict[Head, int] = {}
        self.heads = np.zeros(len(lexicon.meanings), np.int64)
        for number in first:
            self.heads[number] = heads.setdefault(lexicon.heads[number], len(heads))
        operations, tails = self._operations(meanings)
        shown: dict[tuple[bytes, int], int] = {}
        for number, line in first.items():
            origin = lexicon.heads[number].origin
            if origin.clean:
                host = origin.host, origin.pid
                shown[host] = min(shown.get(host, self.size), line)
        remarks, texts = self._remarks(meanings, slow)
        self._count_silent(tally, meanings)
        return Scan(
            self.size,
            list(heads),
            operations,
            tails,
            slow,
            sorted(self.witness.hosts + [(line, *host) for host, line in shown.items()]),
            self._groups(meanings),
            remarks,
            texts,
            self.tallies.tallies(),
        )

    def _read_lines(self, chosen: Flags) -> list[SlowLine]:
        rows = np.flatnonzero(chosen)
        slow = []
        for row, (begin, end, message, head, _) in zip(rows.tolist(), self.lines[rows].tolist(), strict=True):
            raw, known = self.data[begin:end], self.lexicon.heads.get(head)
            self.repeats = self.repeats or _may_repeat(raw)
            if known is not None and known.origin.clean and known.op is None:
                level, body = b"CALL" if known.is_call else b"INFO", self.data[message:end].rstrip(b"\r")
                entry = SlowLine(row, tuple(nccl_lines.read_piece(known.origin, body, level)))
            else:
                entry = self.witness.read(row, nccl_lines.clean_line(raw))
            if entry.messages or entry.raw is not None:
                slow.append(entry)
            if entry.raw is None:
                self.tallies.add_line(raw, entry.messages, row)
        return slow

    def _first_lines(self) -> dict[int, int]:
        """Return the first line of each known head, by the number of the head."""
        first = np.full(len(self.lexicon.meanings), self.size)
        first[self.head[::-1]] = np.arange(self.size)[::-1]
        known = np.array(list(self.lexicon.heads), np.int64)
        known = known[first[known] < self.size]
        return dict(zip(known.tolist(), first[known].tolist(), strict=True))

    def _operations(self, meanings: npt.NDArray[np.int8]) -> tuple[Rows, list[Tail]]:
        rows = self.operations[meanings[self.operations[:, 0]] == OPERATION]
        line = rows[:, 0]
        numbers, tail = numbered(self.text[line])
        columns: Rows = {
            "line": line,
            "head": self.heads[self.head[line]],
            "tail": tail,
            "opcount": rows[:, 1],
            "sendbuff": rows[:, 2].view(np.uint64),
            "recvbuff": rows[:, 3].view(np.uint64),
            "elements": rows[:, 4],
        }
        return columns, [self.lexicon.tails[number] for number in numbers]

    def _groups(self, meanings: npt.NDArray[np.int8]) -> Rows:
        line = np.flatnonzero((meanings == GROUP_START) | (meanings == GROUP_END))
        return {
            "line": line,
            "head": self.heads[self.head[line]],
            "step": np.where(meanings[line] == GROUP_START, 1, -1),
        }

    def _remarks(self, meanings: npt.NDArray[np.int8], slow: list[SlowLine]) -> tuple[Rows, list[bytes]]:
        """Return all remarks, and their texts.

        Equal links of one head are combined into one remark with a count, unless a communicator begins or ends between
        them.
        """
        events = [
            entry.line
            for entry in slow
            if entry.raw is not None
            or any(isinstance(m, nccl_lines.InitLine | nccl_lines.EndLine) for m in entry.messages)
        ]
        lines = np.flatnonzero(meanings >= REMARK)
        heads = self.heads[self.head[lines]]
        numbers, text = numbered(self.text[lines])
        stage = np.searchsorted(np.array(events, np.int64), lines)
        key = (stage * (int(heads.max(initial=0)) + 1) + heads) * max(len(numbers), 1) + text
        is_link = meanings[lines] == LINK
        repeated = np.flatnonzero(is_link)
        number, first, times = first_of_each(key[repeated])
        first = np.concatenate([repeated[first], np.flatnonzero(~is_link)])
        times = np.concatenate([times, np.ones(len(first) - len(number), np.int64)])
        order = np.argsort(first)
        first, times = first[order], times[order]
        columns: Rows = {"line": lines[first], "head": heads[first], "text": text[first], "times": times}
        return columns, [self.lexicon.remarks[number] for number in numbers]

    def _count_silent(self, tally: _Tally, meanings: npt.NDArray[np.int8]) -> None:
        """Count by kind the regular lines whose messages go to no table."""
        kinds = np.where(meanings == IGNORED, self.lexicon.kinds[self.text], np.int8(-1))
        for number, count, lines in tally(self.data, self.lines, kinds):
            self.tallies.add(self.lexicon.kind_names[number], count, [self._example(line) for line in lines])
        informed = self.lexicon.has_form[self.text] & (meanings == IGNORED)
        for number in set(self.text[informed].tolist()):
            self.tallies.note(*self.lexicon.forms[number])

    def _example(self, line: int) -> Example:
        begin, end, message = self.lines[line, :3].tolist()
        raw = self.data[begin:end]
        if self.head[line] < RESERVED:
            return headless_example(line, raw)
        return example_of(line, raw, self.data[message:end].rstrip(b"\r"))
