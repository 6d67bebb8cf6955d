"""What heads, messages and ends of operation lines mean: each distinct one is looked at once."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from commprof.nccl import lines as nccl_lines
from commprof.nccl.heads import HEAD, Origin
from commprof.nccl.layouts import Tail, read_tail
from commprof.nccl.spelling import OPERATIONS
from commprof.nccl.topology import Link
from commprof.schema import Op

_MOST_REMEMBERED: Final = 100_000
_NAME: Final = re.compile(rb"(?:\[\d+\] )?(\w+): |nccl(\w+)\(")


class Head(NamedTuple):
    """What stands in front of the fields of a regular line: who wrote it, the operation, if it is one, and the level."""

    origin: Origin
    op: Op | None
    is_call: bool


class Lexicon:
    """Remembers what distinct texts mean, up to some hundred thousand of them."""

    def __init__(self) -> None:
        self._heads: dict[bytes, Head | None] = {}
        self._bodies: dict[bytes, int] = {}
        self._shapes: dict[bytes, bool] = {}
        self._tails: dict[bytes, Tail | None] = {}

    def head(self, text: bytes) -> Head | None:
        """The head that ``text`` is, up to where the fields begin; None where that takes a closer look."""
        try:
            return self._heads[text]
        except KeyError:
            begin = _begin_of_head(text)
            if begin and not nccl_lines.may_speak_headless(text[:begin]):
                # A time in front of a head makes it a text of its own, but says nothing.
                head = self.head(text[begin:])
                if head is not None and head.origin.clean:
                    return head
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

    def may_speak(self, shape: bytes) -> bool:
        """Whether a message of this shape may be anything but ignored. Most are never seen again, and mean nothing."""
        speaks = self._shapes.get(shape)
        if speaks is None:
            if len(self._shapes) >= _MOST_REMEMBERED:
                self._shapes.clear()
            speaks = self._shapes[shape] = nccl_lines.may_speak(shape)
        return speaks

    def body(self, text: bytes) -> int:
        """What a message of this text is: one of the numbers below."""
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


def _begin_of_head(text: bytes) -> int:
    """Where the words begin that a head has by right: ``host:pid:tid [device]``, or one word in front of CALL."""
    end = text.rfind(b" NCCL ")
    if not text.startswith(b" NCCL CALL", end):
        end = text.rfind(b" ", 0, max(end, 0))
    return text.rfind(b" ", 0, max(end, 0)) + 1


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
