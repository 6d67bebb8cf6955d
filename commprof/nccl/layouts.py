"""Operation lines of regular form, read column by column: all lines of a block at once.

A line belongs here when it is exactly what ``src/enqueue.cc`` of NVIDIA/nccl prints, field by field. Whatever
differs in any way is left to :mod:`commprof.nccl.lines`, which reads one line at a time and is the definition of what
a line means; this module only has to agree with it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from commprof.nccl.fields import Flags, Positions, Text
from commprof.nccl.rows import NONE, Rows

# What a row holds of a line, with its type, and what stands for a field that the line does not have.
FIELDS: Final[dict[str, tuple[type[np.generic], int]]] = {
    "opcount": (np.int64, NONE),
    "sendbuff": (np.uint64, 0),
    "recvbuff": (np.uint64, 0),
    "elements": (np.int64, NONE),
    "datatype": (np.int32, NONE),
    "reduction": (np.int64, NONE),
    "root": (np.int32, NONE),
    "comm": (np.uint64, 0),
    "nranks": (np.int32, NONE),
    "stream": (np.uint64, 0),
    "global_rank": (np.int32, NONE),
}


class _Token(NamedTuple):
    """One word of a COLL line: a keyword to verify, or a field with the most digits that it may have."""

    keyword: bytes = b""
    field: str = ""
    digits: int = 0


_PLAIN: Final = (
    _Token(b"opCount"), _Token(field="opcount", digits=15),
    _Token(b"sendbuff"), _Token(field="sendbuff"),
    _Token(b"recvbuff"), _Token(field="recvbuff"),
    _Token(b"count"), _Token(field="elements", digits=16),
    _Token(b"datatype"), _Token(field="datatype", digits=3),
    _Token(b"op"), _Token(field="reduction", digits=10),
    _Token(b"root"), _Token(field="root", digits=9),
    _Token(b"comm"), _Token(field="comm"),
    _Token(field="nranks", digits=9),
    _Token(b"stream"), _Token(field="stream"),
)  # fmt: skip
_ACC: Final = (_Token(b"acc"), _Token(field="acc"))
_TASK: Final = (
    _Token(b"task"), _Token(field="task", digits=9),
    _Token(b"globalrank"), _Token(field="global_rank", digits=9),
)  # fmt: skip
# RCCL adds an accumulator, and in newer releases the task and the rank in the job.
COLL_LAYOUTS: Final = (
    _PLAIN,
    _PLAIN[:6] + _ACC + _PLAIN[6:],
    _PLAIN + _TASK,
    _PLAIN[:6] + _ACC + _PLAIN[6:] + _TASK,
)
_POINTERS: Final = frozenset({"sendbuff", "recvbuff", "comm", "stream", "acc"})


class Bodies(NamedTuple):
    """Texts that stand one behind the other in ``text``: where each begins, and where it ends (its newline excluded)."""

    text: Text
    begin: Positions
    end: Positions

    def delimiters(self, found: Flags) -> tuple[Positions, Positions]:
        """Positions where ``found`` is set, and the number of the first of them for each body, with a closing one."""
        positions = np.flatnonzero(found)
        return positions, np.append(np.searchsorted(positions, self.begin), len(positions))


def read_coll(bodies: Bodies) -> tuple[Rows, Flags]:
    """The fields of COLL lines, from ``opCount`` on, and where they are of regular form."""
    blanks, first = bodies.delimiters(bodies.text.data == ord(" "))
    number = np.diff(first)
    columns, regular = _empty(len(bodies.begin)), np.zeros(len(bodies.begin), bool)
    for layout in COLL_LAYOUTS:
        rows = np.flatnonzero(number == len(layout) - 1)
        if not len(rows):
            continue
        inner = blanks[first[rows] + np.arange(len(layout) - 1)[:, None]]
        begins = np.vstack([bodies.begin[rows], inner + 1])
        ends = np.vstack([inner, bodies.end[rows]])
        right = np.ones(len(rows), bool)
        for token, begin, end in zip(layout, begins, ends, strict=True):
            right &= _read_token(bodies.text, token, begin, end, columns, rows)
        regular[rows] = right & (columns["comm"][rows] != 0)
    return columns, regular


def _read_token(
    text: Text, token: _Token, begin: Positions, end: Positions, columns: Rows, rows: Positions
) -> Flags:
    """Verify one token of all lines, and keep its numbers."""
    if token.keyword:
        same: Flags = end - begin == len(token.keyword)
        return same & text.starts_with(begin, token.keyword)
    if token.field in _POINTERS:
        values, right = text.pointer(begin, end)
    elif token.field == "opcount":
        values, right = text.hexadecimal(begin, end, token.digits)
    elif token.field == "nranks":
        decimals, right = text.decimal(begin + len(b"[nranks="), end - 1, token.digits)
        right &= text.starts_with(begin, b"[nranks=") & text.starts_with(end - 1, b"]")
        columns["nranks"][rows] = decimals
        return right
    else:
        decimals, right = text.decimal(begin, end, token.digits)
        if token.field in columns:
            columns[token.field][rows] = decimals
        return right
    if token.field in columns:
        columns[token.field][rows] = values
    return right


def read_call(bodies: Bodies) -> tuple[Rows, Flags, Positions]:
    """The fields of CALL lines, from ``nccl`` on: columns, where they are regular, and where the arguments begin."""
    data = bodies.text.data
    marks, first = bodies.delimiters((data == ord(",")) | (data == ord("(")) | (data == ord(")")))
    columns, regular = _empty(len(bodies.begin)), np.zeros(len(bodies.begin), bool)
    arguments = bodies.begin.copy()
    rows = np.flatnonzero(np.diff(first) == 9)
    if not len(rows):
        return columns, regular, arguments
    text, inner = bodies.text, marks[first[rows][:, None] + np.arange(9)]
    right = text.starts_with(bodies.begin[rows], b"nccl") & (inner[:, 8] == bodies.end[rows] - 1)
    right &= (data[inner[:, 0]] == ord("(")) & (data[inner[:, 8]] == ord(")"))
    right &= (data[inner[:, 1:8]] == ord(",")).all(axis=1)
    begins, ends = inner[:, :8].T + 1, inner[:, 1:].T
    for field, begin, end in zip(("sendbuff", "recvbuff"), begins, ends, strict=False):
        columns[field][rows], exact = text.hexadecimal(begin, end, 16)
        right &= exact
    numbers = (("elements", 16), ("datatype", 3), ("reduction", 10), ("root", 9))
    for (field, digits), begin, end in zip(numbers, begins[2:], ends[2:], strict=False):
        columns[field][rows], exact = text.decimal(begin, end, digits)
        right &= exact
    for field, begin, end in zip(("comm", "stream"), begins[6:], ends[6:], strict=True):
        columns[field][rows], exact = text.pointer(begin, end)
        right &= exact
    regular[rows] = right & (columns["comm"][rows] != 0)
    arguments[rows] = begins[0]
    return columns, regular, arguments


def _empty(length: int) -> Rows:
    return {name: np.full(length, missing, kind) for name, (kind, missing) in FIELDS.items()}
