"""Parses warnings of NCCL, and the trace lines of an error from the failing function up to the called one.

Formats of ``src/debug.cc`` and ``src/include/checks.h`` of NVIDIA/nccl. Pure: bytes in, tuples out.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Message(NamedTuple):
    """One warning, abort or trace. ``result`` is the ncclResult of a trace; ``function`` is printed since 2.30.7."""

    level: str
    source: str | None
    function: str | None
    result: int | None
    text: str


_WHERE = re.compile(rb"([^\s:()\[\]]{1,200}+:\d{1,9})(?: \(([^\s()]{1,200}+)\))?")
_TRACE = re.compile(
    rb"([^\s:()\[\]]{1,200}+:\d{1,9}) -> (\d{1,3})(?: \[(?:Async thread|Proxy Thread|Progress Thread)\])?",
    re.IGNORECASE,
)


def read_warning(head_extra: bytes, body: bytes, level: str = "warn") -> Message | None:
    """The warning after a head of level WARN (or ABORT).

    Args:
        head_extra: the text between ``[device]`` and ``NCCL WARN``: ``init.cc:123`` or ``init.cc:123 (function)``;
            empty for a plugin.
        body: the text after ``NCCL WARN ``.
        level: ``warn`` or ``abort``.

    Returns:
        None where ``head_extra`` is neither: then the head is damaged.
    """
    where = _WHERE.fullmatch(head_extra.strip())
    if where is None and head_extra.strip():
        return None
    return Message(
        level,
        None if where is None else _text(where[1]),
        None if where is None or where[2] is None else _text(where[2]),
        None,
        _text(body.strip()),
    )


def read_trace(body: bytes) -> Message | None:
    """The trace of an error: ``init.cc:1234 -> 3``, with the kind of the thread if it is not the caller's.

    >>> read_trace(b"misc/socket.cc:47 -> 3").result
    3
    """
    if b" -> " not in body[:260]:
        return None
    body = body.rstrip()
    match = _TRACE.fullmatch(body)
    if match is None:
        return None
    return Message("trace", _text(match[1]), None, int(match[2]), _text(body))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
