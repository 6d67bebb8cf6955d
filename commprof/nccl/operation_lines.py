"""The operation lines of a block: found, and read together where they are of regular form."""

from __future__ import annotations

import numpy as np

from commprof.nccl.fields import Positions, Text
from commprof.nccl.layouts import FIELDS_LENGTH, Tail, Varying, find_coll, read_call, read_coll
from commprof.nccl.lexicon import Lexicon
from commprof.nccl.line_index import LineIndex
from commprof.nccl.rows import Rows


def find_operations(index: LineIndex, lexicon: Lexicon) -> tuple[Rows, list[Tail], Positions]:
    """The operation lines among the regular ones: their fields, their tails, and where every line's message begins.

    The message of an operation begins with its fields: its name goes with the head.
    """
    text = Text(index.data)
    last = len(index.data) - FIELDS_LENGTH
    begins = np.where(index.regular, index.messages, index.begins)
    coll_rows = np.flatnonzero(index.regular & ~index.is_call)
    coll_rows, coll_begins = find_coll(text, coll_rows[begins[coll_rows] <= last], begins)
    call_rows = np.flatnonzero(index.regular & index.is_call)
    call_rows = call_rows[begins[call_rows] <= last]
    call_begins = begins[call_rows] + len(b"nccl")
    call_begins += text.length(call_begins, b"(") + 1
    found: list[tuple[Positions, Positions, Varying]] = []
    for rows, at, read in ((coll_rows, coll_begins, read_coll), (call_rows, call_begins, read_call)):
        fields, right = read(text, at)
        # A line that was cut within a name may seem to go on in the next one.
        chosen = np.flatnonzero(right & (fields.tails <= index.ends[rows]))
        found.append((rows[chosen], at[chosen], Varying(*(column[chosen] for column in fields))))
    rows = np.concatenate([entry[0] for entry in found])
    order = np.argsort(rows, kind="stable")
    rows, starts = rows[order], np.concatenate([entry[1] for entry in found])[order]
    pairs = zip(*(entry[2] for entry in found), strict=True)
    fields = Varying(*(np.concatenate(pair)[order] for pair in pairs))
    codes, tails = _read_tails(index, lexicon, rows, fields.tails)
    whole = np.flatnonzero(codes >= 0)
    begins[rows[whole]] = starts[whole]
    columns: Rows = {name: column[whole] for name, column in fields._asdict().items() if name != "tails"}
    columns["tail"], columns["line"] = codes[whole], rows[whole]
    return columns, tails, begins


def _read_tails(
    index: LineIndex, lexicon: Lexicon, rows: Positions, begins: Positions
) -> tuple[Positions, list[Tail]]:
    """The tails of some lines: the number of each, -1 where it is none, and the distinct ones."""
    if not len(rows):
        return rows, []
    texts, codes = index.encode_ends(rows, begins)
    read = [lexicon.tail(text) for text in texts]
    known = np.array([tail is not None for tail in read])
    numbers = np.where(known, np.cumsum(known) - 1, -1)
    return numbers[codes], [tail for tail in read if tail is not None]
