"""One block of log lines, read column by column where its lines are regular and one by one where they are not.

Heads and messages repeat: each distinct one is looked at once. Pure but for its caches: the same block gives the same
result in any process, so blocks can be read side by side. What depends on earlier blocks (which hosts are known,
which communicator an address means) is left to the caller.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commprof.nccl import lines as nccl_lines
from commprof.nccl.census import Silence, Tally, tally_block
from commprof.nccl.fields import Flags, Positions
from commprof.nccl.heads import KnownHosts
from commprof.nccl.layouts import Tail
from commprof.nccl.lexicon import GROUP_END, GROUP_START, LINK, MESSAGE, REMARK, Head, Lexicon
from commprof.nccl.line_index import LineIndex, Scratch, Texts
from commprof.nccl.operation_lines import find_operations
from commprof.nccl.repeats import distinct, first_of_each, numbered
from commprof.nccl.rows import Rows


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
        self._lexicon, self._scratch = Lexicon(), Scratch()

    def scan(self, data: bytes) -> Scan:
        """Read a block of whole lines; the last may lack its newline."""
        if data and not data.endswith(b"\n"):
            data += b"\n"
        return _Block(LineIndex(data, self._scratch), self._lexicon).read(self._careful)


class _Block:
    """The reading of one block; lines and rows count from 0."""

    def __init__(self, index: LineIndex, lexicon: Lexicon) -> None:
        self.index, self.lexicon = index, lexicon

    def read(self, careful: bool) -> Scan:
        """Sort the lines into those that are read together and those that are read one by one."""
        if careful:
            self.index.regular[:], self.index.headless[:] = False, False
        operations, tails, begins = find_operations(self.index, self.lexicon)
        number = len(operations["line"])
        is_operation = np.zeros(self.index.size, bool)
        is_operation[operations["line"]] = True
        valid = np.repeat(self.index.regular, 2)
        valid[1::2] &= ~is_operation
        texts, head_codes, body_codes = self.index.encode(begins, valid)
        heads = {code: self.lexicon.head(texts[code]) for code in distinct(head_codes, len(texts))}
        shapes, shape_of = texts.shapes()
        meaning = np.zeros(len(texts) + 1, np.int8)
        bodies = np.array(distinct(body_codes, len(texts)), np.int64)
        speaks = np.array([self.lexicon.may_speak(text) for text in shapes], bool)
        bodies = bodies[speaks[shape_of[bodies]]]
        meaning[bodies] = [self.lexicon.body(text) for text in texts.take(bodies)]
        fits = np.zeros((2, len(texts) + 1), bool)
        for code, head in heads.items():
            fits[:, code] = head is not None, head is not None and head.op is not None
        meanings = meaning[body_codes]
        fast = self.index.regular & fits[0][head_codes] & (is_operation == fits[1][head_codes])
        fast &= meanings != MESSAGE
        witness = _Witness()
        slow = self._read_slowly(~fast & (~self.index.headless | self._speaking()), witness)
        known = {code: head for code, head in heads.items() if head is not None}
        contested = witness.pids | {head.origin.pid for head in known.values() if head.origin.clean}
        unsure = [c for c, h in known.items() if not h.origin.clean and h.origin.pid in contested]
        if unsure:
            doubtful = fast & np.isin(head_codes, unsure)
            fast &= ~doubtful
            slow = sorted(slow + self._read_slowly(doubtful, witness), key=lambda entry: entry.line)
        first = np.full(len(texts) + 1, self.index.size)
        first[head_codes[::-1]] = np.arange(self.index.size)[::-1]
        numbering = np.full(len(texts) + 1, -1, np.int32)
        # What stands in front of a head, as a time, makes texts differ that say the same.
        heads_met: dict[Head, int] = {}
        numbering[list(known)] = [heads_met.setdefault(head, len(heads_met)) for head in known.values()]
        line_heads = numbering[head_codes]
        if number:
            keep = fast[operations["line"]]
            operations = {name: column[keep] for name, column in operations.items()}
        operations["head"] = line_heads[operations["line"]]
        shown: dict[tuple[bytes, int], int] = {}
        for code, head in known.items():
            if head.origin.clean:
                host = head.origin.host, head.origin.pid
                shown[host] = min(shown.get(host, self.index.size), int(first[code]))
        hosts = witness.hosts + [(line, *host) for host, line in shown.items()]
        remarking = np.flatnonzero(fast & ~self.index.is_call & (meanings >= REMARK))
        remarks, said = _remarks(
            remarking,
            meanings[remarking] == LINK,
            line_heads[remarking].astype(np.int64),
            body_codes[remarking],
            slow,
        )
        grouping = np.flatnonzero(
            fast & self.index.is_call & ((meanings == GROUP_START) | (meanings == GROUP_END))
        )
        groups: Rows = {
            "line": grouping,
            "head": line_heads[grouping],
            "step": np.where(meanings[grouping] == GROUP_START, 1, -1),
        }
        return Scan(
            self.index.size,
            list(heads_met),
            operations,
            tails,
            slow,
            sorted(hosts),
            groups,
            remarks,
            texts.take(np.array(said, np.int64)),
            self._tallies(
                [operations["line"], remarking, grouping], fast, body_codes, (texts, shapes, shape_of), slow
            ),
        )

    def _tallies(
        self,
        spoken: list[Positions],
        fast: Flags,
        codes: Positions,
        messages: tuple[Texts, list[bytes], Positions],
        slow: list[SlowLine],
    ) -> dict[str, Tally]:
        """The lines that gave nothing, by kind."""
        silent = np.ones(self.index.size, bool)
        silent[np.concatenate([*spoken, np.array([line.line for line in slow], np.int64)])] = False
        known, rest = np.flatnonzero(silent & fast), silent & ~fast
        silence = Silence(
            known,
            self.index.is_call[known],
            codes[known],
            *messages,
            np.flatnonzero(rest & ~self.index.headless),
            np.flatnonzero(rest & self.index.headless),
        )
        read = [(line.line, line.messages) for line in slow if line.raw is None]
        return tally_block(
            self.index.data, self.index.begins, self.index.ends, self.index.returns, silence, read
        )

    def _speaking(self) -> Flags:
        """The lines without a head that may say something nevertheless."""
        flags = np.zeros(self.index.size, bool)
        rows = np.flatnonzero(self.index.headless & (self.index.ends > self.index.begins))
        lines = self.index.whole_lines(rows)
        text, ends = lines.data, lines.ends
        for mark in nccl_lines.HEADLESS_MARKS:
            at = text.find(mark)
            while at >= 0:
                number = int(np.searchsorted(ends, at, "right"))
                flags[rows[number]] = True
                at = text.find(mark, int(ends[number]))
        return flags

    def _read_slowly(self, chosen: Flags, witness: _Witness) -> list[SlowLine]:
        rows = np.flatnonzero(chosen)
        spans = zip(
            rows.tolist(), self.index.begins[rows].tolist(), self.index.ends[rows].tolist(), strict=True
        )
        read = (
            witness.read(row, nccl_lines.clean_line(self.index.data[begin:end])) for row, begin, end in spans
        )
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
    said, text = numbered(bodies)
    stage = np.searchsorted(np.array(events, np.int64), lines)
    key = (stage * (int(heads.max(initial=0)) + 1) + heads) * max(len(said), 1) + text
    repeated = np.flatnonzero(is_link)
    number, first, times = first_of_each(key[repeated])
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
