"""Classifies the lines that go to no table: recognized messages by topic, and unrecognized lines by reason.

The module lists the messages of NCCL 2.4 to 2.30 that have no table, by topic, from ``src/`` of NVIDIA/nccl. A message
is recognized only if it begins like one of these messages. All other messages are of unknown form.

The functions are pure: they take bytes and return names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from commprof.nccl.grammar import lines as nccl_lines
from commprof.nccl.grammar.line_prefix import KnownHosts, split_messages
from commprof.nccl.grammar.versions import form_of

READ: Final = "read"
BLANK: Final = "blank"
TORN: Final = "torn operation"
UNKNOWN_OPERATION: Final = "operation of unknown name"
OF_UNKNOWN_FORM: Final = {
    b"INFO": "INFO line of unknown form",
    b"CALL": "CALL line of unknown form",
    b"WARN": "WARN line of unknown form",
    b"ABORT": "ABORT line of unknown form",
    b"TRACE": "TRACE line of unknown form",
}
DAMAGED_HEAD: Final = "NCCL line with a damaged head"
NO_HEAD: Final = "line of another program"
NOT_TEXT: Final = "binary or invalid UTF-8"
TOO_LONG: Final = "longer than 16 MiB"

# Patterns for the beginnings of messages, by topic.
_BEGINNINGS: Final[dict[str, tuple[bytes, ...]]] = {
    "operations": (
        rb"Launch mode ",
        rb"stream is being captured",
        rb"CUDA Graph helper",
        rb"ncclRma\w",
        rb"scheduleRmaTasks",
        rb"SymCheck: ",
        rb"ncclGetUniqueId\(",
        rb"ncclGroupSimulateEnd\(",
        rb"ncclRedOp\w{1,30}\(",
        rb"ncclCommGrow\(",
        rb"ncclCommInitRank\w{0,20}\(",
    ),
    "CollNet": (
        rb"(?i:collnet)(?! ?/?plugin)",
        rb"Coll Trees ",
        rb"CollTree ",
        rb"Connected (?i:collnet)",
        rb"rank \d{1,9} \[coll ",
    ),
    "communicators": (
        rb"bootstrapSplit: ",
        rb"Init timings",
        rb"Bootstrap timings",
        rb"Rank \d{1,9}:? (?:has color|Generated)",
        rb"ncclCommGrow: ",
        rb"CommRevokeAsync",
        rb"comm (?:0x[0-9a-f]{1,16}|\d{1,20}) rank \d{1,9} nRanks \d{1,9} nNodes ",
        rb"comm 0x[0-9a-f]{1,16} .{1,160}? - (?:Abort|Destroy|Revoke) (?:START|COMPLETE)",
    ),
    "network and plugins": (
        rb"Bootstrap ?: ",
        rb"(?:NET|ENV|GIN|RMA|TUNER|PROFILER|CollNet|P\dP|IB)/\w{1,20} ?:",
        rb"NET ?:",
        rb"OOB ",
        rb"P\dP plugin",
        rb"Using (?:network|internal|non-device|\S{1,40} plugin)",
        rb"(?:Assigned|Initialized|Loaded|Closing) \S{1,20} .{0,20}plugin",
        rb"Plugin (?:Path|name set)",
        rb"Successfully loaded",
        rb"Failed to open lib",
        rb"No plugin found",
        rb"DMA-BUF ",
        rb"GPU Direct ",
        rb"socketProgress",
        rb"Could not find: lib",
        rb"Could not get speed from ",
        rb"Failed to initialize \S{1,20} plugin",
    ),
    "environment": (
        rb"NCCL_\w{1,60} set (?:by|to)",
        rb"cudaDriverVersion ",
        rb"NCCL git version ",
        rb"NCCL_\w{1,60}: ",
        rb"(?i:comm) config ",
    ),
    "topology search": (
        rb"={3,}",
        rb"\s{0,60}[+-] \w{1,8}\[",
        rb"\s{0,60}\d{1,4} : (?:NET|GPU|NIC|CPU)/",
        rb"(?:CPU|GPU|NIC|NET|PCI|NVS)/",
        rb"Pattern \d",
        rb"Setting affinity ",
        rb"ncclTopo\w",
        rb"MNNVL ",
        rb"NVLS (?:Head|comm|multicast)",
        rb"Attribute ",
        rb"Affinity ",
        rb"Topology ",
        rb"TOPO/NET : ",
        rb"=== System",
    ),
    "connections": (
        rb"Connected ",
        rb"\d{1,9} coll channels, ",
        rb"New proxy ",
        rb"P\dP Chunksize ",
        rb"UDS: ",
        rb"\[(?:Proxy|Service|Progress)",
        rb"proxyProgress",
        rb"ncclPollProxy",
        rb"ncclProxy\w",
        rb"resp\.opId",
        rb"(?:send|recv)Connect ",
        rb"Queuing opId=",
        rb"Received and initiated",
        rb"Opening channel",
        rb"Check P\dP",
        rb"Duplicating rings",
        rb"ncclP\dpSchedule: ",
    ),
    "memory": (
        rb"Allocated ",
        rb"MMAP allocated",
        rb"Mem Realloc",
        rb"MemManager",
        rb"\S{1,80}:\d{1,9} (?:Cuda |memory stack|Mem)",
        rb"(?:de)?register comm ",
        rb"NVLS ",
        rb"CUDA Dev ",
        rb"CC (?:On|Off)",
        rb"Cuda \w{1,20} Size",
    ),
    "RAS": (rb"RAS ",),
}
KNOWN: Final = tuple(_BEGINNINGS)
"""The topics of recognized messages that have no table."""
# One group for each topic, so that one match per message finds its topic.
_ANY_KNOWN: Final = re.compile(rb"|".join(rb"(%s)" % rb"|".join(texts) for texts in _BEGINNINGS.values()))
RECOGNIZED: Final = frozenset({READ, BLANK, *KNOWN})
_LOOKED_AT: Final = 300
_TORN_LINES: Final = (nccl_lines.TornLine, nccl_lines.FragmentLine)
_DIGITS_ALIKE: Final = bytes.maketrans(b"0123456789", b"0" * 10)


def shape(text: bytes) -> bytes:
    """Return ``text`` with all digits replaced by 0. The topic of a message does not depend on its digits.

    >>> shape(b"localRank 12 -> 7")
    b'localRank 00 -> 0'
    """
    return text.translate(_DIGITS_ALIKE)


def kind_of_message(level: bytes, body: bytes) -> str:
    """Return the kind of a message that goes to no table: its topic, or the reason why it is unrecognized.

    Args:
        level: ``INFO``, ``CALL``, ``WARN``, ``ABORT`` or ``TRACE``.
        body: The text after the head. Only its beginning is read.

    >>> kind_of_message(b"INFO", b"Using network Socket")
    'network and plugins'
    """
    body = shape(body[:_LOOKED_AT])
    if match := _ANY_KNOWN.match(body):
        return KNOWN[(match.lastindex or 1) - 1]
    return OF_UNKNOWN_FORM[level] if is_text(body) else NOT_TEXT


def form_of_message(body: bytes) -> str | None:
    """Return the form of a message that goes to no table; None if the form does not depend on the version of NCCL."""
    return form_of(shape(body[:_LOOKED_AT]))


def kind_of_line(raw: bytes) -> tuple[str, bytes | None]:
    """Return the kind of a line from which the line reader read no message, and the text of the deciding message.

    If a line has several messages, an unrecognized message decides. The text is None if the line has no head.
    """
    line = nccl_lines.clean_line(raw)
    messages = split_messages(line, KnownHosts())
    if messages:
        kinds = [kind_of_message(message.level, message.body) for message in messages]
        worst = next((n for n, kind in enumerate(kinds) if kind not in RECOGNIZED), 0)
        return kinds[worst], messages[worst].body[:_LOOKED_AT]
    return kind_of_headless(raw), None


def kind_of_headless(raw: bytes) -> str:
    """Return the kind of a line without a head."""
    if not raw.strip(b"\r"):
        return BLANK
    if b"\0" in raw or not is_text(raw):
        return NOT_TEXT
    return (
        DAMAGED_HEAD if b" NCCL INFO " in raw or b" NCCL WARN " in raw or b" NCCL CALL " in raw else NO_HEAD
    )


def kind_of_messages(messages: Sequence[nccl_lines.Line]) -> str:
    """Return the kind of a line from which the line reader read ``messages``."""
    if any(isinstance(message, _TORN_LINES) for message in messages):
        return TORN
    if any(isinstance(message, nccl_lines.UnknownOpLine) for message in messages):
        return UNKNOWN_OPERATION
    return READ


def is_text(data: bytes) -> bool:
    """Return whether ``data`` is UTF-8. A truncated character at the end of ``data`` is allowed."""
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.end == len(data) and error.reason == "unexpected end of data"
    return True
