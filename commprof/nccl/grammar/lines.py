"""The line reader: parses lines about operations and communicators into immutable records.

Formats of NCCL 2.4 to 2.30 and RCCL, from ``src/debug.cc``, ``src/enqueue.cc`` and ``src/init.cc`` of NVIDIA/nccl.
Messages are searched, not anchored at the start of the line: launchers, agents and terminals write text before
them. Where processes share a stdout, or flush it in blocks, lines are interleaved or truncated: a line may have two
messages, and a message may lack its head or its tail. A message that begins like an operation and does not parse
completely is a :class:`TornLine`. It is never repaired.

Pure: bytes in, tuples out. Text fields stay bytes, as they are repeated millions of times; numbers are ints.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from commprof.nccl.grammar.line_prefix import KnownHosts, Origin, split_messages
from commprof.nccl.grammar.spelling import OPERATIONS
from commprof.nccl.grammar.topology import Topology, read_topology
from commprof.nccl.grammar.tuning import TuningLine, TuningModelLine, read_tuning
from commprof.nccl.grammar.versions import form_of
from commprof.nccl.grammar.warnings import Message, read_trace, read_warning
from commprof.schema import Op


class CollLine(NamedTuple):
    """``AllReduce: opCount 3f sendbuff ..``: printed when the operation is called, subsystem COLL."""

    origin: Origin
    op: Op
    opcount: int
    sendbuff: bytes
    recvbuff: bytes
    elements: int
    datatype: int
    reduction: int
    root: int
    comm: bytes
    nranks: int
    stream: bytes
    global_rank: int | None  # printed by RCCL only


class CallLine(NamedTuple):
    """``NCCL CALL ncclAllReduce(..)``: the same call again, subsystem CALL at level TRACE, without opCount and nranks."""

    origin: Origin
    op: Op
    sendbuff: bytes
    recvbuff: bytes
    elements: int
    datatype: int
    reduction: int
    root: int
    comm: bytes
    stream: bytes


class InitLine(NamedTuple):
    """A communicator begins: its address, rank and size. ``stage`` is start, complete or call."""

    origin: Origin
    stage: str
    api: bytes | None
    comm: bytes
    rank: int
    nranks: int
    cuda_device: int | None
    bus_id: bytes | None
    comm_id: bytes | None
    parent: bytes | None
    split: bytes | None  # splitCount or childCount: equal on all ranks of one split
    color: int | None
    form: str  # a key of versions.FORMS: which versions print this form


class EndLine(NamedTuple):
    """A communicator ends: ``how`` is destroy or abort. Its address may be reused."""

    origin: Origin
    how: str
    comm: bytes
    form: str | None = None  # a key of versions.FORMS: which versions print this form


class VersionLine(NamedTuple):
    """The banner; ``origin`` is None for the bare form that rank 0 of a job prints."""

    origin: Origin | None
    version: str


class TorchCommLine(NamedTuple):
    """torch's line that names the process group of a communicator's address."""

    comm: bytes
    pg: bytes | None
    description: bytes | None
    rank: int


class TornLine(NamedTuple):
    """A message that begins like an operation and is truncated; ``origin`` is None when its head is missing."""

    origin: Origin | None
    op: Op
    kind: str


class UnknownOpLine(NamedTuple):
    """An operation line of a name that the tables do not know (one-sided operations, forks of NCCL)."""

    name: str


class GroupLine(NamedTuple):
    """``ncclGroupStart()`` (``step`` 1) or ``ncclGroupEnd()`` (-1): operations between them are launched together."""

    origin: Origin
    step: int


class RemarkLine(NamedTuple):
    """A line of topology or tuning, or a warning, which names no communicator."""

    origin: Origin
    record: Topology | TuningLine | TuningModelLine | Message
    form: str | None = None  # a key of versions.FORMS: which versions print this form


class FragmentLine(NamedTuple):
    """A fragment of an operation's line without a beginning: its fields without its name, or its name without a head."""


Line = (
    CollLine
    | CallLine
    | InitLine
    | EndLine
    | VersionLine
    | TorchCommLine
    | TornLine
    | UnknownOpLine
    | GroupLine
    | RemarkLine
    | FragmentLine
)

# Repeats are bounded or possessive: a line of megabytes must not take quadratic time, and an edited number must
# not overflow the column that it goes to.
_POINTER = rb"(?:0x[0-9a-f]{1,16}+|\(nil\))"
_ADDRESS = rb"0x[0-9a-f]{1,16}+"
_COLL = re.compile(
    rb"(?:\[\d+\] )?(\w+): opCount ([0-9a-f]{1,15}) sendbuff ("
    + _POINTER
    + rb") recvbuff ("
    + _POINTER
    + rb")"
    # acc is RCCL's, and so are task and globalrank
    + rb"(?: acc \S{1,20})? count (\d{1,18}) datatype (\d{1,3}) op (\d{1,10}) root (-?\d{1,9})"
    rb" comm (" + _ADDRESS + rb") \[nranks=(\d{1,9})\] stream (" + _POINTER + rb")(?!\w)"
    rb"(?: task -?\d{1,9} globalrank (\d{1,9})(?!\w))?"
)
_COLL_BEGIN = re.compile(
    rb"\s{0,200}(?:\[\d+\] )?(\w{1,40}+): (?:opCount(?: |$)|o(?:p(?:C(?:o(?:u(?:n)?)?)?)?)?$)"
)
_CALL = re.compile(
    rb"nccl(\w+)\(([0-9a-f]{1,16}),([0-9a-f]{1,16}),(\d{1,18}),(\d{1,3}),(\d{1,10}),(-?\d{1,9}),("
    + _ADDRESS
    + rb"),("
    + _POINTER
    + rb")\)"
)
_CALL_BEGIN = re.compile(rb"nccl(\w{1,40}+)\(")
_NAMES = b"|".join(sorted(OPERATIONS, reverse=True))
# An operation that is named where no message begins: its head is missing.
_MENTION = re.compile(rb"(?<!\w)(?:" + _NAMES + rb"): opCount |NCCL CALL nccl(?:" + _NAMES + rb")\(")
_COMM = re.compile(
    rb"(?P<marked>\[Rank \d+\] )?(?:(?P<api>\w+) )?comm (?P<comm>" + _ADDRESS + rb") rank (?P<rank>\d{1,9})"
    rb" n[rR]anks (?P<nranks>\d{1,9}) cudaDev (?P<device>-?\d{1,5})(?: nvmlDev (?P<nvml>-?\d{1,5}))?"
    rb"(?: busId (?P<bus>[0-9a-f]{1,16}))?(?: parent (?P<parent>" + _POINTER + rb"))?"
    rb"(?: (?P<split>(?:split|child)Count \d{1,9}))?(?: color (?P<color>-?\d{1,10}) key -?\d{1,10})?"
    rb"(?: commId (?P<id>" + _ADDRESS + rb"))?"
    rb"(?P<event>.{0,200}?- (?:Init START|Init COMPLETE|Destroy COMPLETE|Abort COMPLETE)|\s*$)"
)
_DESTROYED = re.compile(rb"Destroyed comm (" + _ADDRESS + rb") rank \d+")
_INIT_CALL = re.compile(
    rb"ncclCommInitRank\((" + _ADDRESS + rb"), ?(\d{1,9}), ?(" + _ADDRESS + rb"), ?(\d{1,9}), ?(-?\d{1,5})\)"
)
_SPLIT_CALL = re.compile(
    rb"ncclCommSplit\(("
    + _ADDRESS
    + rb"), (-?\d{1,10}), -?\d{1,10}, ("
    + _ADDRESS
    + rb"), (\d{1,9}), (\d{1,9})\)"
)
_VERSION = re.compile(rb"NCCL version (\d{1,3}\.\d{1,3}(?:\.\d{1,3})?)")
_TORCH = re.compile(
    rb"(?:\[PG (?:ID )?(\S{1,40}?)(?: PG GUID \S{1,40}?)? ?(?:\(([^)]{0,80})\))? Rank (\d{1,9})\]|\[Rank (\d{1,9})\])"
    rb" ?ProcessGroupNCCL created ncclComm_ (" + _ADDRESS + rb") on"
)
GROUP_STEPS = {b"ncclGroupStart()": 1, b"ncclGroupEnd()": -1, b"ncclGroupSimulateEnd()": -1}
_COLOURS = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_CONTROLS = bytes(range(32)).replace(b"\t", b"") + b"\x7f"


_NO_OPERATIONS: Final = (InitLine, EndLine, VersionLine, TorchCommLine, GroupLine)


def clean_line(line: bytes) -> bytes:
    """``line`` without terminal colors, control bytes and text that a carriage return has overwritten."""
    line = line.rstrip(b"\r")
    if b"\r" in line:
        line = line.rpartition(b"\r")[2]
    if b"\x1b" in line:
        line = _COLOURS.sub(b"", line)
    return line.translate(None, _CONTROLS)


def read_line(line: bytes, hosts: KnownHosts) -> list[Line]:
    """The messages of one physical line about operations and communicators, in order.

    Text before the first head is a launcher's label or the rest of a truncated line.
    """
    messages = split_messages(line, hosts)
    lines: list[Line] = []
    first = messages[0].start if messages else len(line)
    if first:
        lines.extend(read_headless(line[:first]))
    for message in messages:
        lines.extend(read_piece(message.origin, message.body, message.level, message.source))
    return lines


def read_piece(origin: Origin, body: bytes, level: bytes, source: bytes = b"") -> list[Line]:
    """The text after one head, up to the next one: a message, and what is interleaved with it."""
    message = read_message(origin, body, level, source)
    if message is None:
        return []
    # interleaved after or within it
    if isinstance(message, _NO_OPERATIONS) and _MENTION.search(body):
        return [message, FragmentLine()]
    return [message]


def read_message(origin: Origin, body: bytes, level: bytes, source: bytes = b"") -> Line | None:
    """The message after one head, None when it goes to no table."""
    if level == b"TRACE":
        # Builds with TRACE=1 repeat in these lines what INFO lines say: starts of communicators, choices of algorithms.
        return FragmentLine() if _MENTION.search(body) else None
    message = _call(origin, body) if level == b"CALL" else _info(origin, body)
    if message is None and _MENTION.search(body):
        return FragmentLine()
    if message is not None or level == b"CALL":
        return message
    record: Topology | TuningLine | TuningModelLine | Message | None
    if level in (b"WARN", b"ABORT"):
        record = read_warning(source, body, level.decode().lower())
    else:
        record = read_topology(body) or read_tuning(body) or read_trace(body)
    if record is None:
        return None
    named = isinstance(record, Message) and record.function is not None
    return RemarkLine(origin, record, "warn_with_function" if named else form_of(body))


def read_headless(text: bytes) -> list[Line]:
    """The messages before the first head: banners, torch's lines, and lines that lost their head."""
    lines: list[Line] = []
    lines.extend(VersionLine(None, banner[1].decode()) for banner in _VERSION.finditer(text))
    if created := _TORCH.search(text):
        rank = created[3] or created[4]
        lines.append(TorchCommLine(created[5], created[1], created[2], int(rank)))
    if begin := _COLL_BEGIN.match(text):
        lines.append(_torn(None, begin[1], "coll"))
    elif b"[nranks=" in text or _MENTION.search(text):
        lines.append(FragmentLine())
    return lines


def _torn(origin: Origin | None, name: bytes, kind: str) -> TornLine | UnknownOpLine:
    op = OPERATIONS.get(name)
    return UnknownOpLine(name.decode()) if op is None else TornLine(origin, op, kind)


def _info(origin: Origin, body: bytes) -> Line | None:
    """A message of level INFO (or in its form)."""
    match = _COLL.match(body)
    if match:
        name, opcount, sendbuff, recvbuff, count, datatype, reduction, root, comm, nranks, stream, rank = (
            match.groups()
        )
        op = OPERATIONS.get(name)
        if op is None:
            return UnknownOpLine(name.decode())
        return CollLine(
            origin,
            op,
            int(opcount, 16),
            sendbuff,
            recvbuff,
            int(count),
            int(datatype),
            int(reduction),
            int(root),
            comm,
            int(nranks),
            stream,
            None if rank is None else int(rank),
        )
    if begin := _COLL_BEGIN.match(body):
        return _torn(origin, begin[1], "coll")
    if banner := _VERSION.match(body):
        return VersionLine(origin, banner[1].decode())
    if destroyed := _DESTROYED.match(body):
        return EndLine(origin, "destroy", destroyed[1])
    return _comm(origin, body)


def _comm(origin: Origin, body: bytes) -> Line | None:
    """A line about the life of a communicator."""
    match = _COMM.match(body)
    if match is None:
        return None
    event = match["event"]
    if event.endswith(b"Destroy COMPLETE"):
        return EndLine(origin, "destroy", match["comm"], "end_complete")
    if event.endswith(b"Abort COMPLETE"):
        return EndLine(origin, "abort", match["comm"], "end_complete")
    # Only 2.4.2 prints the start of a communicator without "Init START".
    stage = "complete" if event.endswith(b"COMPLETE") else "start"
    color = match["color"]
    return InitLine(
        origin,
        stage,
        match["api"],
        match["comm"],
        int(match["rank"]),
        int(match["nranks"]),
        int(match["device"]),
        match["bus"],
        match["id"],
        match["parent"],
        match["split"],
        None if color is None else _color(color),
        _form(match),
    )


def _form(match: re.Match[bytes]) -> str:
    """The form of an Init line, from the fields that it has."""
    if match["marked"] or (match["split"] or b"").startswith(b"child"):
        return "init_marked"
    if match["split"]:
        return "split_counted"
    if match["parent"] and not match["id"]:
        return "split_without_id"
    if match["api"]:
        if match["parent"]:
            return "split_with_id"
        if match["api"] == b"ncclCommInitRank":
            return "init_named"
        return "init_api"
    if match["id"]:
        return "init_id_nvml" if match["nvml"] else "init_id"
    return "init_bus" if match["bus"] else "init_nvml"


def _call(origin: Origin, body: bytes) -> Line | None:
    """A message of level CALL."""
    match = _CALL.match(body)
    if match:
        name, sendbuff, recvbuff, count, datatype, reduction, root, comm, stream = match.groups()
        op = OPERATIONS.get(name)
        if op is None:
            return UnknownOpLine(name.decode())
        return CallLine(
            origin, op, sendbuff, recvbuff, int(count), int(datatype), int(reduction), int(root), comm, stream
        )
    if init := _INIT_CALL.match(body):
        comm, nranks, comm_id, rank, device = init.groups()
        return InitLine(
            origin, "call", b"ncclCommInitRank", comm, int(rank), int(nranks), int(device), None, comm_id,
            None, None, None, "call",
        )  # fmt: skip
    if split := _SPLIT_CALL.match(body):
        parent, color, comm, rank, nranks = split.groups()
        return InitLine(
            origin, "call", b"ncclCommSplit", comm, int(rank), int(nranks), None, None, None,
            parent, None, _color(color), "call",
        )  # fmt: skip
    if body in GROUP_STEPS:
        return GroupLine(origin, GROUP_STEPS[body])
    begin = _CALL_BEGIN.match(body)
    if begin and begin[1] in OPERATIONS:
        return TornLine(origin, OPERATIONS[begin[1]], "call")
    return None


def _color(text: bytes) -> int | None:
    """The color of a split; None for a number that NCCL's int does not hold, as in damaged lines."""
    color = int(text)
    return color if -(2**31) <= color < 2**31 else None
