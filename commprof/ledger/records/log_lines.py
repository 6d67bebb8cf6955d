"""Finds the operations that NCCL ran for each record, from the log lines that an alignment matched with the record."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from commprof.ledger.records.row_index import Lookup, Numbers, combinations, where

LINE_COLUMNS: Final = ("file", "line", "op")
MATCH_COLUMNS: Final = (
    "state",
    "rank",
    "attempt",
    "record_pid",
    "seq",
    "op",
    "file",
    "line",
    "host",
    "line_pid",
)
_WRITTEN: Final = ("host", "line_pid", "rank", "record_pid", "state")
_PLACE: Final = ("file",)
_OF_MATCH: Final = ("rank", "attempt", "record_pid")
_OF_RECORD: Final = ("rank", "attempt", "pid")


class Writer(NamedTuple):
    """A process that wrote lines of a log: the host and process id that its lines contain."""

    host: str | None
    pid: int


class LogLines:
    """The lines of a log and their records. Both are added in parts: first all lines, then the alignment.

    Attributes:
        states: The number of rows of the alignment by state.
        writers: The number of lines by state for each process of the log.
        ambiguous_extra: The smallest possible number of ambiguous lines without a record.
        pairs: The number of lines that match a record, by the rank and process id of the record and the process of the
            line.
    """

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self.writers: dict[Writer, Counter[str]] = defaultdict(Counter)
        self.pairs: Counter[tuple[int, int, Writer]] = Counter()
        self.ambiguous_extra = 0
        self._ops: dict[str, int] = {}  # the bit of each operation
        self._printed = Lookup(np.bitwise_or)
        self._ran = Lookup(np.bitwise_or)

    def add_printed(self, lines: pa.Table) -> None:
        """Add lines of the log, with the columns :data:`LINE_COLUMNS`. One line may name several operations."""
        self._printed.add(lines, _PLACE, "line", self._bits(lines))

    def add_matches(self, matches: pa.Table) -> None:
        """Add rows of table ``matches``, with the columns :data:`MATCH_COLUMNS`."""
        for (state,), places in combinations(matches, ["state"]):
            self.states[state] += len(places)
        for (host, pid, rank, own, state), places in combinations(matches, list(_WRITTEN)):
            if pid is not None:
                self.writers[Writer(host, pid)][state] += len(places)
                if own is not None:
                    self.pairs[rank, own, Writer(host, pid)] += len(places)
        pairs = matches.filter(pa.array(where(matches, ["state"], lambda state: state == "matched")))
        own = self._bits(pairs)
        printed, known = self._printed.find(pairs, _PLACE, "line")
        another = known & (printed & own == 0)
        self._ran.add(pairs, _OF_MATCH, "seq", np.where(another, self._first_of_each(printed), own))

    def executed_ops(self, records: pa.Table) -> pa.Array:
        """Return the operations that ran for each record, joined by ``+``. Null if no line matches the record."""
        ran, known = self._ran.find(records, _OF_RECORD, "seq")
        distinct, codes = np.unique(np.where(known, ran, 0), return_inverse=True)
        texts = ["+".join(self._named(bits)) or None for bits in distinct.tolist()]
        return pa.array(texts, pa.string()).take(pa.array(codes))

    def _bits(self, rows: pa.Table) -> Numbers:
        bits = np.zeros(len(rows), np.int64)
        for (op,), places in combinations(rows, ["op"]):
            bits[places] = 1 << self._ops.setdefault(op, len(self._ops))
        return bits

    def _first_of_each(self, bits: Numbers) -> Numbers:
        distinct, codes = np.unique(bits, return_inverse=True)
        first = [1 << self._ops[self._named(each)[0]] if each else 0 for each in distinct.tolist()]
        return np.array(first, np.int64)[codes]

    def _named(self, bits: int) -> list[str]:
        return sorted(op for op, place in self._ops.items() if bits >> place & 1)
