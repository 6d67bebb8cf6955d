"""The line reader: parses lines about operations and communicators into immutable records.

Formats of NCCL 2.4 to 2.30 and RCCL, from ``src/debug.cc``, ``src/enqueue.cc`` and ``src/init.cc`` of NVIDIA/nccl.
The reader searches messages anywhere in a line, because launchers, agents and terminals write text before them. If
processes share a stdout, or flush it in blocks, lines are interleaved or truncated. A line may then have two messages,
and a message may lack its head or its tail. A message that begins like an operation and does not parse completely is a
:class:`TornLine`. It is never repaired.

The functions are pure: they take bytes and return tuples. Numbers are ints. Text fields stay bytes, because the same
texts are repeated millions of times.
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
    """An operation line of subsystem COLL: ``AllReduce: opCount 3f sendbuff ..``. NCCL prints it for each call."""

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
    """An operation line of subsystem CALL, ``NCCL CALL ncclAllReduce(..)``, printed at level TRACE.

    NCCL prints this line in addition to the COLL line of the same call. It has neither opCount nor nranks.
    """

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
    """A line about the initialization of a communicator, with its address, rank and size.

    ``stage`` is ``start``, ``complete`` or ``call``.
    """

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
    split: bytes | None  # splitCount or childCount, which is equal on all ranks of one split
    color: int | None
    form: str  # a key of versions.FORMS, which lists the versions that print this form


class EndLine(NamedTuple):
    """A line about the end of a communicator. ``how`` is ``destroy`` or ``abort``. NCCL may reuse the address later."""

    origin: Origin
    how: str
    comm: bytes
    form: str | None = None  # a key of versions.FORMS, which lists the versions that print this form


class VersionLine(NamedTuple):
    """The banner with the version of NCCL. ``origin`` is None for the form without a head, which rank 0 prints."""

    origin: Origin | None
    version: str


class TorchCommLine(NamedTuple):
    """A line of torch that names the process group of a communicator, by the address of the communicator."""

    comm: bytes
    pg: bytes | None
    description: bytes | None
    rank: int


class TornLine(NamedTuple):
    """A truncated message that begins like an operation. ``origin`` is None if the head of the message is missing."""

    origin: Origin | None
    op: Op
    kind: str


class UnknownOpLine(NamedTuple):
    """An operation line with an unknown name, such as a one-sided operation or an operation of a fork of NCCL."""

    name: str


class GroupLine(NamedTuple):
    """A call of ``ncclGroupStart()`` (``step`` is 1) or ``ncclGroupEnd()`` (``step`` is -1).

    NCCL launches the operations between the two calls together.
    """

    origin: Origin
    step: int


class RemarkLine(NamedTuple):
    """A line about topology or tuning, a warning or a trace. Such lines do not name their communicator."""

    origin: Origin
    record: Topology | TuningLine | TuningModelLine | Message
    form: str | None = None  # a key of versions.FORMS, which lists the versions that print this form


class FragmentLine(NamedTuple):
    """A fragment of an operation line without its beginning.

    The fragment has the fields without the name of the operation, or the name without the head.
    """


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

# Repeats are bounded or possessive, so that a line of several megabytes does not take quadratic time, and an edited
# number does not overflow its column.
_POINTER = rb"(?:0x[0-9a-f]{1,16}+|\(nil\))"
_ADDRESS = rb"0x[0-9a-f]{1,16}+"
_COLL = re.compile(
    rb"(?:\[\d+\] )?(\w+): opCount ([0-9a-f]{1,15}) sendbuff ("
    + _POINTER
    + rb") recvbuff ("
    + _POINTER
    + rb")"
    # only RCCL prints acc, task and globalrank
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
# The name of an operation at a position where no message begins. The head of this operation is missing.
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
    """Return ``line`` without terminal colors, control bytes, and text that is overwritten after a carriage return."""
    line = line.rstrip(b"\r")
    if b"\r" in line:
        line = line.rpartition(b"\r")[2]
    if b"\x1b" in line:
        line = _COLOURS.sub(b"", line)
    return line.translate(None, _CONTROLS)


def read_line(line: bytes, hosts: KnownHosts) -> list[Line]:
    """Return the messages of one physical line that go to a table or are counted, in order.

    Text before the first head is a label of a launcher, or the rest of a truncated line.

    Args:
        line: The line after :func:`clean_line`.
        hosts: The known hosts, which are updated with the hosts in this line.
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
    """Return the messages in the text between one head and the next: a message, and fragments interleaved with it."""
    message = read_message(origin, body, level, source)
    if message is None:
        return []
    # An operation is interleaved after or within the message.
    if isinstance(message, _NO_OPERATIONS) and _MENTION.search(body):
        return [message, FragmentLine()]
    return [message]


def read_message(origin: Origin, body: bytes, level: bytes, source: bytes = b"") -> Line | None:
    """Return the message after one head; None if the message goes to no table."""
    if level == b"TRACE":
        # Builds with TRACE=1 repeat the content of INFO lines here: starts of communicators, choices of algorithms.
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
    """Return the messages before the first head: banners, lines of torch, and operation lines without their head."""
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
    """Return a message of level INFO (or in the form of this level) about an operation or a communicator."""
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
    """Return a message about the begin or the end of a communicator."""
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
    """Return the form of an Init line (a key of versions.FORMS), which follows from its fields."""
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
    """Return a message of level CALL."""
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
    """Return the color of a split; None if the number exceeds NCCL's int, which occurs in damaged lines."""
    color = int(text)
    return color if -(2**31) <= color < 2**31 else None
