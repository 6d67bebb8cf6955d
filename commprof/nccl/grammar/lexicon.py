"""The meanings of the texts that the compiled scanner numbers: heads, messages and tails of operation lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from commprof.nccl.grammar import lines as nccl_lines
from commprof.nccl.grammar.line_kinds import BLANK, NO_HEAD, NOT_TEXT, form_of_message, kind_of_message
from commprof.nccl.grammar.line_prefix import HEAD, Origin
from commprof.nccl.grammar.spelling import OPERATIONS
from commprof.nccl.grammar.topology import Link
from commprof.nccl.tables.op_buffer import NONE
from commprof.schema import Op

# MESSAGE: the line reader reads a line with such a text.
IGNORED, MESSAGE, OPERATION, GROUP_START, GROUP_END, REMARK, LINK = range(7)
# Lines without texts have these numbers: blank, of another program, not text; and those that are not regular.
_WITHOUT_TEXT: Final = (BLANK, NO_HEAD, NOT_TEXT)
RESERVED: Final = len(_WITHOUT_TEXT) + 1
_NO_KIND: Final = -1
_NAME: Final = re.compile(rb"(?:\[\d+\] )?(\w+): |nccl(\w+)\(")
_NOBODY: Final = Origin(b"-", 0, 0, None, True)
_LEVELS: Final = {b"I": b"INFO", b"S": b"INFO", b"C": b"CALL"}


class Head(NamedTuple):
    """The text before the fields of a regular line: its writer, the operation, if it is one, and the level."""

    origin: Origin
    op: Op | None
    is_call: bool


class Tail(NamedTuple):
    """The values in the tail of an operation line, with the texts of addresses; NONE for absent ones."""

    datatype: int
    reduction: int
    root: int
    comm: bytes
    nranks: int
    stream: bytes
    global_rank: int


class Lexicon:
    """The meaning of each text by its number.

    Attributes:
        meanings: one of the numbers above; MESSAGE for irregular lines, heads and tails, which the line reader reads.
        kinds: for texts without values, the number of their kind in ``kind_names``.
        has_form: whether ``forms`` has an entry: kind and form (a key of :data:`commprof.nccl.grammar.versions.FORMS`).
        heads: the heads that are known.
        tails: the ends of operation lines that are known.
        remarks: messages about topology, tuning and errors.
    """

    def __init__(self) -> None:
        self.meanings = np.array([IGNORED] * len(_WITHOUT_TEXT) + [MESSAGE], np.int8)
        self.kind_names = list(_WITHOUT_TEXT)
        self.kinds = np.array([*range(len(_WITHOUT_TEXT)), _NO_KIND], np.int8)
        self.has_form = np.zeros(RESERVED, bool)
        self.forms: dict[int, tuple[str, str]] = {}
        self.heads: dict[int, Head] = {}
        self.tails: dict[int, Tail] = {}
        self.remarks: dict[int, bytes] = {}

    def learn(self, texts: Sequence[bytes]) -> None:
        """Read texts that are new; they have the next numbers. The first byte of each is its type: see the scanner."""
        first = len(self.meanings)
        meanings = [self._learn(first + place, text[:1], text[1:]) for place, text in enumerate(texts)]
        kinds = [
            self._kind(first + place, text) if meaning == IGNORED and text[:1] in _LEVELS else _NO_KIND
            for place, (text, meaning) in enumerate(zip(texts, meanings, strict=True))
        ]
        has_form = [first + place in self.forms for place in range(len(texts))]
        self.meanings = np.append(self.meanings, np.array(meanings, np.int8))
        self.kinds = np.append(self.kinds, np.array(kinds, np.int8))
        self.has_form = np.append(self.has_form, np.array(has_form, bool))

    def _learn(self, number: int, tag: bytes, text: bytes) -> int:
        """Read one text; its meaning."""
        if tag == b"H":
            head = _read_head(text)
            if head is None:
                return MESSAGE
            self.heads[number] = head
            return IGNORED
        if tag == b"T":
            tail = read_tail(text)
            if tail is None:
                return MESSAGE
            self.tails[number] = tail
            return OPERATION
        if tag == b"S":
            return IGNORED
        meaning = _read_body(text, _LEVELS[tag])
        if meaning >= REMARK:
            self.remarks[number] = text
        return meaning

    def _kind(self, number: int, text: bytes) -> int:
        """The number of the kind of a message without values."""
        kind, form = kind_of_message(_LEVELS[text[:1]], text[1:]), form_of_message(text[1:])
        if form is not None:
            self.forms[number] = kind, form
        if kind not in self.kind_names:
            self.kind_names.append(kind)
        return self.kind_names.index(kind)


def _read_body(text: bytes, level: bytes) -> int:
    message = nccl_lines.read_message(_NOBODY, text, level)
    if message is None:
        return IGNORED
    if isinstance(message, nccl_lines.GroupLine):
        return GROUP_START if message.step > 0 else GROUP_END
    if isinstance(message, nccl_lines.RemarkLine):
        return LINK if isinstance(message.record, Link) else REMARK
    return MESSAGE


def _read_head(text: bytes) -> Head | None:
    """The head that ``text`` is, up to where the fields begin; None where the line reader must read it."""
    head = HEAD.search(text)
    if head is None:
        return None
    name = text[head.end() :]
    op = None
    if name:
        named = _NAME.fullmatch(name)
        op = OPERATIONS.get(named[1] or named[2]) if named else None
        if named is None or op is None or bool(named[2]) != (head["call"] is not None):
            return None
    start = head.start()
    if start and nccl_lines.read_headless(text[:start]):
        return None
    host, pid, tid, device = head["host"], head["pid"], head["tid"], head["device"]
    clean = start == 0 or text[start - 1 : start].isspace()
    origin = Origin(host, int(pid), int(tid), None if device is None else int(device), clean)
    return Head(origin, op, head["call"] is not None)


def read_tail(text: bytes) -> Tail | None:
    """The values in the tail of an operation line, after the count; None where the line is truncated.

    >>> read_tail(b",7,0,0,0x3,0x4)").datatype
    7
    """
    level, fields = (
        (b"CALL", b"ncclAllReduce(1,1,0")
        if text.startswith(b",")
        else (b"INFO", b"AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x1 count 0")
    )
    line = nccl_lines.read_message(_NOBODY, fields + text, level)
    if isinstance(line, nccl_lines.CollLine):
        rank = NONE if line.global_rank is None else line.global_rank
        return Tail(line.datatype, line.reduction, line.root, line.comm, line.nranks, line.stream, rank)
    if isinstance(line, nccl_lines.CallLine):
        return Tail(line.datatype, line.reduction, line.root, line.comm, NONE, line.stream, NONE)
    return None
