"""Collect the rows of the ``matches`` table during an alignment, column by column."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.alignment_streams import Expectation
from commprof.align.sequences.edits import Codes
from commprof.trace.tables import conform

STATES: Final = ("matched", "missing", "extra", "ambiguous", "torn")
MATCHED, MISSING, EXTRA, LIKELY_EITHER, TORN = range(len(STATES))
NOBODY: Final = -1
UNCLEAR: Final = (
    "torch turns this call into sends and receives, and the record does not have their sizes; "
    "commprof does not look for their lines"
)
SILENT: Final = "nothing was sent: the call leaves no line"
TORN_LINE: Final = "the line is truncated: its content is not known"
_RECORD_COLUMNS: Final = {
    "rank": "rank", "attempt": "attempt", "record_pid": "pid", "seq": "seq", "pg": "pg",
    "record_bytes": "payload_bytes",
}  # fmt: skip
_LINE_COLUMNS: Final = {
    "comm": "comm", "comm_id": "comm_id", "line_bytes": "message_bytes", "file": "file", "line": "line",
    "host": "host", "line_pid": "pid", "comm_epoch": "comm_epoch",
}  # fmt: skip


class MatchRows:
    """Collects the rows: pairs, and records or lines without a partner."""

    def __init__(self, collectives: pa.Table, ops: pa.Table) -> None:
        self._collectives, self._ops = collectives, ops
        self._blocks: list[tuple[int, Codes, Codes, Codes, Codes, Codes]] = []
        self._reasons: dict[str, int] = {}

    def add_matched(self, expectation: Expectation, places: Codes, lines: Codes) -> None:
        """Add lines that belong to the records at ``places`` of the expectation."""
        line_numbers, line_counts = expectation.line_numbers[places], expectation.line_counts[places]
        self._add(MATCHED, expectation.records[places], lines, line_numbers, line_counts, None)

    def add_expected(self, state: int, expectation: Expectation, places: Codes, reason: str) -> None:
        """Add lines that records should have left, and that are missing or ambiguous."""
        records = expectation.records[places]
        nowhere = np.full(len(places), NOBODY)
        self._add(
            state, records, nowhere, expectation.line_numbers[places], expectation.line_counts[places], reason
        )

    def add_records(self, state: int, records: Codes, reason: str) -> None:
        """Add records that have no lines to search."""
        nobody = np.full(len(records), NOBODY)
        self._add(
            state, records, nobody, nobody, np.full(len(records), 0 if state == MATCHED else -1), reason
        )

    def add_lines(self, state: int, lines: Codes, reason: str) -> None:
        """Add lines without a record, lines with several possible records, and truncated lines."""
        nobody = np.full(len(lines), NOBODY)
        self._add(state, nobody, lines, nobody, nobody, reason)

    def name_of(self, record: int) -> str:
        """Return a short text that identifies a record."""
        row = self._collectives.select(["seq", "op", "step"]).slice(record, 1).to_pylist()[0]
        return f"seq {row['seq']} {row['op']} (step {row['step']}):"

    def table(self) -> pa.Table:
        """Return the rows as table ``matches``.

        Records come first, in order of rank, attempt, process and issue. Lines without a record follow, in
        the order of the log.
        """
        states = np.concatenate(
            [np.full(len(block[1]), block[0]) for block in self._blocks] or [np.empty(0, np.int64)]
        )
        records, lines, line_numbers, line_counts, reasons = (
            np.concatenate([block[column] for block in self._blocks] or [np.empty(0, np.int64)]).astype(
                np.int64
            )
            for column in range(1, 6)
        )
        order = self._order(records, lines, line_numbers)
        states, records, lines = states[order], records[order], lines[order]
        columns = {
            name: _taken(self._collectives[source], records) for name, source in _RECORD_COLUMNS.items()
        }
        columns |= {name: _taken(self._ops[source], lines) for name, source in _LINE_COLUMNS.items()}
        columns["op"] = pc.coalesce(_taken(self._collectives["op"], records), _taken(self._ops["op"], lines))
        columns["state"] = pa.array(STATES).take(pa.array(states.astype(np.int64)))
        columns["part"], columns["parts"] = (
            _nullable(values[order]) for values in (line_numbers, line_counts)
        )
        columns["reason"] = _taken(
            pa.chunked_array([pa.array(list(self._reasons), pa.string())]), reasons[order]
        )
        return conform("matches", pa.table(columns))

    def _add(
        self,
        state: int,
        records: Codes,
        lines: Codes,
        line_numbers: Codes,
        line_counts: Codes,
        reason: str | None,
    ) -> None:
        if len(records):
            number = NOBODY if reason is None else self._reasons.setdefault(reason, len(self._reasons))
            self._blocks.append(
                (state, records, lines, line_numbers, line_counts, np.full(len(records), number))
            )

    def _order(self, records: Codes, lines: Codes, part: Codes) -> Codes:
        positions = np.zeros(self._collectives.num_rows + 1, np.int64)
        ranks = [
            np.asarray(self._collectives[name]).astype(np.int64) for name in ("seq", "pid", "attempt", "rank")
        ]
        positions[np.lexsort(ranks)] = np.arange(self._collectives.num_rows)
        positions[-1] = self._collectives.num_rows  # lines without a record follow all records
        return np.asarray(np.lexsort((part, lines, positions[records])))


def _taken(column: pa.ChunkedArray, rows: Codes) -> pa.ChunkedArray:
    if pa.types.is_string(column.type) and len(rows):  # dictionary codes are reordered instead of texts
        encoded = column.combine_chunks().dictionary_encode()
        codes = encoded.indices.take(pa.array(rows, mask=rows < 0))
        return pa.chunked_array([pa.DictionaryArray.from_arrays(codes, encoded.dictionary).cast(pa.string())])
    return column.take(pa.array(rows, mask=rows < 0))


def _nullable(values: Codes) -> pa.Array:
    return pa.array(values, pa.int32(), mask=values < 0)


def torn_lines(ops: pa.Table) -> dict[tuple[int, str], list[str]]:
    """Return the places of the truncated lines of each process and operation, as ``file:line``."""
    torn: dict[tuple[int, str], list[str]] = {}
    rows = ops.filter(pc.equal(ops["state"], "torn")).select(["pid", "op", "file", "line"])
    for row in rows.to_pylist():
        if row["pid"] is not None:
            torn.setdefault((row["pid"], row["op"]), []).append(f"{row['file']}:{row['line']}")
    return torn
