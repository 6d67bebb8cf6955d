"""Interprets the texts that the compiled scanner numbers: heads, messages, and tails of operation lines."""

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

# The meanings of texts. MESSAGE means that the line reader must read a line with such a text.
IGNORED, MESSAGE, OPERATION, GROUP_START, GROUP_END, REMARK, LINK = range(7)
# The first numbers are reserved for lines without numbered texts: blank lines, lines of another program, and lines that
# are not text. The next number is reserved for lines that are not regular.
_WITHOUT_TEXT: Final = (BLANK, NO_HEAD, NOT_TEXT)
RESERVED: Final = len(_WITHOUT_TEXT) + 1
_NO_KIND: Final = -1
_NAME: Final = re.compile(rb"(?:\[\d+\] )?(\w+): |nccl(\w+)\(")
_NOBODY: Final = Origin(b"-", 0, 0, None, True)
_LEVELS: Final = {b"I": b"INFO", b"S": b"INFO", b"C": b"CALL"}


class Head(NamedTuple):
    """The content of the text before the fields of a regular line.

    Attributes:
        origin: The host, process, thread and device that wrote the line.
        op: The operation; None if the line is not an operation line.
        is_call: Whether the level of the line is CALL.
    """

    origin: Origin
    op: Op | None
    is_call: bool


class Tail(NamedTuple):
    """The values in the tail of an operation line. Addresses are texts, and absent numbers are ``NONE``."""

    datatype: int
    reduction: int
    root: int
    comm: bytes
    nranks: int
    stream: bytes
    global_rank: int


class Lexicon:
    """Stores the meaning of each text, by the number of the text.

    Attributes:
        meanings: The meaning of each text, such as IGNORED or MESSAGE. MESSAGE is the meaning of irregular lines, heads
            and tails, which the line reader reads.
        kind_names: The names of the kinds of lines, by number.
        kinds: For each message that goes to no table, the number of its kind in ``kind_names``; -1 for other texts.
        has_form: For each text, whether ``forms`` has an entry.
        forms: The kind and the form of texts whose form depends on the version of NCCL. The form is a key of
            :data:`commprof.nccl.grammar.versions.FORMS`.
        heads: The parsed heads.
        tails: The parsed tails of operation lines.
        remarks: The messages about topology, tuning and errors.
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
        """Interpret new texts, whose numbers follow the numbers of earlier texts.

        The first byte of each text is its type (see ``_scanner.c``).
        """
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
        """Interpret one text, and return its meaning."""
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
        """Return the number of the kind of a message that goes to no table."""
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
    """Return the head in ``text``, the part of a line before its fields; None if the line reader must read the line."""
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
    """Return the values in the tail of an operation line, after the count; None if the line is truncated.

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
