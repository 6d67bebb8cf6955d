"""An independent reader of NCCL log lines that accepts only the exact printed format.

It implements the formats of ncclEnqueueCheck in src/enqueue.cc (COLL and CALL lines) after the heads of
src/debug.cc of NVIDIA/nccl, with the additions of RCCL. Numbers have at most as many digits as their columns
can store. The module imports nothing from commprof.nccl.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TERM = {
    "AllReduce": "all_reduce", "Reduce": "reduce", "Broadcast": "broadcast", "Bcast": "broadcast",
    "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AlltoAll": "all_to_all", "AllToAll": "all_to_all",
    "Gather": "gather", "Scatter": "scatter", "Send": "send", "Recv": "recv",
}  # fmt: skip
NAME = "(?:" + "|".join(sorted(TERM, key=len, reverse=True)) + ")"
_PTR = r"(?:0x[0-9a-f]{1,16}|\(nil\))"
_HEAD = r"[A-Za-z0-9_][\w.-]{0,63}:\d{1,9}:\d{1,9}"
_COLL = (
    rf"(?:\[\d+\] )?(?P<name>{NAME}): opCount (?P<opcount>[0-9a-f]{{1,15}}) sendbuff {_PTR} recvbuff {_PTR}"
    rf"(?: acc \S{{1,20}})? count (?P<count>\d{{1,18}}) datatype \d{{1,3}} op \d{{1,10}} root -?\d{{1,9}} "
    rf"comm (?P<comm>0x[0-9a-f]{{1,16}}) \[nranks=\d{{1,9}}\] stream (?P<stream>{_PTR})"
)
_CALL = (
    rf"nccl(?P<name>{NAME})\([0-9a-f]{{1,16}},[0-9a-f]{{1,16}},(?P<count>\d{{1,18}}),\d{{1,3}},\d{{1,10}},-?\d{{1,9}},"
    rf"(?P<comm>0x[0-9a-f]{{1,16}}),(?P<stream>{_PTR})\)"
)
# These patterns match a complete line, with an optional label of a launcher before it and optional words of RCCL
# after it.
LINE_COLL = re.compile(
    rf"(?:.*\s)?{_HEAD} \[\d{{1,5}}\] NCCL INFO {_COLL}(?: task -?\d{{1,9}} globalrank \d{{1,9}})?\s*",
    re.ASCII,
)
LINE_CALL = re.compile(rf"(?:.*\s)?{_HEAD} NCCL CALL {_CALL}\s*", re.ASCII)
# These patterns find a complete operation anywhere in a line.
ANY_COLL = re.compile(_COLL, re.ASCII)
ANY_CALL = re.compile(_CALL, re.ASCII)
# The beginning of an operation. A truncated line may end anywhere in ``opCount``.
BEGINS = re.compile(rf"(?<!\w){NAME}: o|nccl{NAME}\(", re.ASCII)
# A message that no reader may ignore, with or without its head.
MENTIONED = re.compile(rf"(?<!\w){NAME}: opCount |NCCL CALL nccl{NAME}\(", re.ASCII)
BEGUN = re.compile(
    rf"(?<!\S){_HEAD} (?:\[\d{{1,5}}\] NCCL INFO {NAME}: opCount |NCCL CALL nccl{NAME}\()", re.ASCII
)
_HEADS = re.compile(rf"{_HEAD} (?:\[|NCCL)", re.ASCII)
_COLOUR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


class WholeLine(NamedTuple):
    """The operation of a physical line that contains nothing but this operation."""

    op: str
    kind: str
    opcount: int | None
    count: int
    comm: str


def printable(line: bytes) -> str:
    """Return the text that a terminal shows for ``line``.

    This is the text after the last carriage return, without colors and control bytes.
    """
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    line = bytes(byte for byte in _COLOUR.sub(b"", line) if (byte >= 32 or byte == 9) and byte != 127)
    return line.decode("latin-1")


def read_strictly(text: str) -> WholeLine | None:
    """Return the operation of a line with exactly one head and one complete message; None for any other line."""
    for kind, pattern in (("coll", LINE_COLL), ("call", LINE_CALL)):
        found = pattern.fullmatch(text)
        if found and len(_HEADS.findall(text)) == 1 and len(BEGINS.findall(text)) == 1:
            opcount = int(found["opcount"], 16) if kind == "coll" else None
            return WholeLine(TERM[found["name"]], kind, opcount, int(found["count"]), found["comm"])
    return None


def whole_messages(text: str) -> list[WholeLine]:
    """Return every complete message in a line, with or without a head."""
    found = [
        WholeLine(TERM[m["name"]], "coll", int(m["opcount"], 16), int(m["count"]), m["comm"])
        for m in ANY_COLL.finditer(text)
    ]
    return found + [
        WholeLine(TERM[m["name"]], "call", None, int(m["count"]), m["comm"]) for m in ANY_CALL.finditer(text)
    ]
