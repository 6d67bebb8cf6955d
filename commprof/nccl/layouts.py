"""Operation lines of regular form, read field by field: one field of all lines of a block at once.

Counts, addresses and numbers of the call differ from line to line and stand first; what follows them, the *tail*, names
types, communicator and stream and is repeated millions of times, so each distinct tail is looked at once. The fields are
those that ``src/enqueue.cc`` of NVIDIA/nccl prints. Whatever differs in any way is left to
:mod:`commprof.nccl.lines`, which reads one line at a time and is the definition of what a line means; it also reads the
tails.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commprof.nccl import lines as nccl_lines
from commprof.nccl.columns import Column
from commprof.nccl.fields import Flags, Positions, Text
from commprof.nccl.heads import Origin
from commprof.nccl.rows import NONE
from commprof.nccl.spelling import OPERATIONS

# No field ends further behind the begin of the fields than this; so much text must follow.
FIELDS_LENGTH = 192
_ONE, _BRACKET = np.uint64(0xFF), np.uint64(ord("["))
# The first eight letters of each name, as a word.
_NAMES_BEGIN = sorted({np.uint64(int.from_bytes((name + b": opCoun")[:8], "little")) for name in OPERATIONS})
_NOBODY = Origin(b"", 0, 0, None, True)


class Varying(NamedTuple):
    """The fields that differ from line to line, and where the tail of each line begins."""

    opcount: Column
    sendbuff: Column
    recvbuff: Column
    elements: Column
    tails: Positions


class Tail(NamedTuple):
    """What the end of an operation line says, with the texts of addresses; NONE for what it does not say."""

    datatype: int
    reduction: int
    root: int
    comm: bytes
    nranks: int
    stream: bytes
    global_rank: int


def find_coll(text: Text, lines: Positions, begins: Positions) -> tuple[Positions, Positions]:
    """Which of ``lines`` are COLL lines, by how their messages begin, and where the fields of these begin.

    Args:
        text: the block.
        lines: numbers of lines of level INFO.
        begins: where the message of each line of the block begins.
    """
    beginnings = text.words(begins[lines])
    chosen = (beginnings & _ONE) == _BRACKET  # RCCL puts the rank in front
    for first in _NAMES_BEGIN:
        chosen |= beginnings == first
    lines = lines[chosen]
    at = begins[lines]
    ranked = np.flatnonzero((beginnings[chosen] & _ONE) == _BRACKET)
    at[ranked] += text.length(at[ranked], b"]") + len(b"] ")
    fields = at + text.length(at, b":") + len(b": ")
    return lines, fields


def read_coll(text: Text, begin: Positions) -> tuple[Varying, Flags]:
    """The fields of COLL lines, from ``opCount`` on, and where they are of regular form."""
    opcount = text.hexadecimal(begin + len(b"opCount "), b" ")
    right = opcount.right & text.starts_with(begin, b"opCount ")
    right &= text.starts_with(opcount.ends, b" sendbuff ")
    send = text.pointer(opcount.ends + len(b" sendbuff "), b" ")
    right &= send.right & text.starts_with(send.ends, b" recvbuff ")
    receive = text.pointer(send.ends + len(b" recvbuff "), b" ")
    right &= receive.right
    ends = receive.ends
    is_counted = text.starts_with(ends, b" count ")
    if not is_counted.all():
        # RCCL adds an accumulator.
        others = np.flatnonzero(~is_counted & right)
        accumulator = text.pointer(ends[others] + len(b" acc "), b" ")
        found = accumulator.right & text.starts_with(ends[others], b" acc ")
        ends[others[found]] = accumulator.ends[found]
        right &= text.starts_with(ends, b" count ")
    elements = text.decimal(ends + len(b" count "), b" ")
    right &= elements.right
    return Varying(
        opcount.values.astype(np.int64),
        send.values,
        receive.values,
        elements.values.astype(np.int64),
        elements.ends,
    ), right


def read_call(text: Text, begin: Positions) -> tuple[Varying, Flags]:
    """The fields of CALL lines, from the first argument on, and where they are of regular form."""
    send = text.hexadecimal(begin, b",")
    receive = text.hexadecimal(send.ends + 1, b",")
    elements = text.decimal(receive.ends + 1, b",")
    return Varying(
        np.full(len(begin), NONE),
        send.values,
        receive.values,
        elements.values.astype(np.int64),
        elements.ends,
    ), send.right & receive.right & elements.right


def read_tail(text: bytes, is_call: bool) -> Tail | None:
    """What a tail says; None where a line that ends so is no whole operation.

    >>> read_tail(b",7,0,0,0x3,0x4)", True).datatype
    7
    """
    level, fields = (
        (b"CALL", b"ncclAllReduce(1,1,0")
        if is_call
        else (b"INFO", b"AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x1 count 0")
    )
    line = nccl_lines.read_message(_NOBODY, fields + text, level)
    if isinstance(line, nccl_lines.CollLine):
        rank = NONE if line.global_rank is None else line.global_rank
        return Tail(line.datatype, line.reduction, line.root, line.comm, line.nranks, line.stream, rank)
    if isinstance(line, nccl_lines.CallLine):
        return Tail(line.datatype, line.reduction, line.root, line.comm, NONE, line.stream, NONE)
    return None
