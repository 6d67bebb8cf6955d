"""What a line of an NCCL log holds, by a reader that takes nothing but the printed format: a second opinion on purpose.

Formats: ncclEnqueueCheck in src/enqueue.cc (COLL and CALL lines) behind the heads of src/debug.cc of NVIDIA/nccl, with the
additions of RCCL; numbers as long as their columns hold. Nothing of commprof.nccl is imported.
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
# Anchored: the line and nothing else, but for a launcher's label in front and RCCL's words behind.
LINE_COLL = re.compile(
    rf"(?:.*\s)?{_HEAD} \[\d{{1,5}}\] NCCL INFO {_COLL}(?: task -?\d{{1,9}} globalrank \d{{1,9}})?\s*",
    re.ASCII,
)
LINE_CALL = re.compile(rf"(?:.*\s)?{_HEAD} NCCL CALL {_CALL}\s*", re.ASCII)
# Searched: a whole operation, wherever it stands.
ANY_COLL = re.compile(_COLL, re.ASCII)
ANY_CALL = re.compile(_CALL, re.ASCII)
# How an operation begins; a torn line may end anywhere in ``opCount``.
BEGINS = re.compile(rf"(?<!\w){NAME}: o|nccl{NAME}\(", re.ASCII)
# A message that nobody may pass over, with its head or without.
MENTIONED = re.compile(rf"(?<!\w){NAME}: opCount |NCCL CALL nccl{NAME}\(", re.ASCII)
BEGUN = re.compile(
    rf"(?<!\S){_HEAD} (?:\[\d{{1,5}}\] NCCL INFO {NAME}: opCount |NCCL CALL nccl{NAME}\()", re.ASCII
)
_HEADS = re.compile(rf"{_HEAD} (?:\[|NCCL)", re.ASCII)
_COLOUR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


class WholeLine(NamedTuple):
    """The operation that a physical line prints, and nothing else stands in it."""

    op: str
    kind: str
    opcount: int | None
    count: int
    comm: str


def printable(line: bytes) -> str:
    """What a terminal shows of ``line``: after the last carriage return, without colours and control bytes."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    line = bytes(byte for byte in _COLOUR.sub(b"", line) if (byte >= 32 or byte == 9) and byte != 127)
    return line.decode("latin-1")


def read_strictly(text: str) -> WholeLine | None:
    """The operation of a line that holds one head and one whole message."""
    for kind, pattern in (("coll", LINE_COLL), ("call", LINE_CALL)):
        found = pattern.fullmatch(text)
        if found and len(_HEADS.findall(text)) == 1 and len(BEGINS.findall(text)) == 1:
            opcount = int(found["opcount"], 16) if kind == "coll" else None
            return WholeLine(TERM[found["name"]], kind, opcount, int(found["count"]), found["comm"])
    return None


def whole_messages(text: str) -> list[WholeLine]:
    """Every whole message that can be found in a line, with or without a head."""
    found = [
        WholeLine(TERM[m["name"]], "coll", int(m["opcount"], 16), int(m["count"]), m["comm"])
        for m in ANY_COLL.finditer(text)
    ]
    return found + [
        WholeLine(TERM[m["name"]], "call", None, int(m["count"]), m["comm"]) for m in ANY_CALL.finditer(text)
    ]
