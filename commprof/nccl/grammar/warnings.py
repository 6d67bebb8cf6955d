"""Parses warnings of NCCL, and the trace lines of an error.

NCCL prints a trace line for each function on the stack, from the failing function up to the function that the program
called. Formats of ``src/debug.cc`` and ``src/include/checks.h`` of NVIDIA/nccl. The functions are pure: they take bytes
and return tuples.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Message(NamedTuple):
    """One warning, abort or trace.

    Attributes:
        level: ``warn``, ``abort`` or ``trace``.
        source: The position in NCCL's source, for example ``init.cc:123``; None if the message has none.
        function: The function that printed the message. NCCL prints it since 2.30.7.
        result: The ncclResult of a trace; None for warnings and aborts.
        text: The text of the message.
    """

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
    """Return the warning after a head of level WARN (or ABORT).

    Args:
        head_extra: The text between ``[device]`` and ``NCCL WARN``: ``init.cc:123`` or ``init.cc:123 (function)``. It
            is empty for a plugin.
        body: The text after ``NCCL WARN ``.
        level: ``warn`` or ``abort``.

    Returns:
        The warning; None if ``head_extra`` has another form, because the head is then damaged.
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
    """Return the trace line of an error, such as ``init.cc:1234 -> 3``; None if ``body`` has another form.

    The line ends with the kind of the thread if the error occurred in a thread of NCCL.

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
