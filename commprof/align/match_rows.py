"""The rows of the ``matches`` table while an alignment finds them."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from commprof.align.streams import Part
from commprof.trace.tables import table_from_rows

UNCLEAR: Final = (
    "torch turns this call into sends and receives whose sizes the record does not hold; "
    "its lines are not looked for"
)
_RECORD_COLUMNS: Final = ("rank", "attempt", "pid", "seq", "pg", "op", "payload_bytes")
_LINE_COLUMNS: Final = ("comm", "comm_id", "op", "message_bytes", "file", "line")
_TORN_COLUMNS: Final = ("state", "op", "pid", "file", "line")


class MatchRows:
    """Collects the rows: pairs, records without a line, lines without a record."""

    def __init__(self, collectives: pa.Table, ops: pa.Table) -> None:
        self._records = {name: collectives[name].to_pylist() for name in _RECORD_COLUMNS}
        self._lines = {name: ops[name].to_pylist() for name in _LINE_COLUMNS}
        self._torn = _torn_lines(ops)
        self._rows: list[dict[str, Any]] = []
        self.unclear = 0

    def add_matched(self, part: Part, line: int) -> None:
        """A line that belongs to a record."""
        self._rows.append({"state": "matched", **self._record(part.record), **self._line(line)})

    def add_missing(self, part: Part, op: str, reason: str | None) -> None:
        """A line that a record should have left; ``op`` is the line's operation."""
        if reason is None:
            reason = "the log has no line for it at this place"
            if part.of > 1:
                reason = f"line {part.number + 1} of the {part.of} that it leaves ({op}) is not in the log"
            torn = self._torn.get((self._records["pid"][part.record], op), [])
            if torn:
                reason += f"; it may be a torn line of this process: {', '.join(torn[:3])}"
        self._rows.append({"state": "missing", **self._record(part.record), "reason": reason})

    def add_unclear(self, record: int) -> None:
        """A record that does not determine the lines that it leaves."""
        self.unclear += 1
        self._rows.append({"state": "missing", **self._record(record), "reason": UNCLEAR})

    def add_extra(self, line: int, reason: str) -> None:
        """A line without a record."""
        row = {"state": "extra", "op": self._lines["op"][line], **self._line(line), "reason": reason}
        self._rows.append(row)

    def table(self) -> pa.Table:
        """The rows as table ``matches``, records first in their order of issue, then extra lines in that of the log."""
        records = [row for row in self._rows if row["state"] != "extra"]
        extras = [row for row in self._rows if row["state"] == "extra"]
        records.sort(key=lambda row: (row["rank"], row["attempt"], row["record_pid"], row["seq"]))
        extras.sort(key=lambda row: (row["file"], row["line"]))
        return table_from_rows("matches", records + extras)

    def _record(self, record: int) -> dict[str, Any]:
        columns = self._records
        return {
            "rank": columns["rank"][record],
            "attempt": columns["attempt"][record],
            "record_pid": columns["pid"][record],
            "seq": columns["seq"][record],
            "pg": columns["pg"][record],
            "op": columns["op"][record],
            "record_bytes": columns["payload_bytes"][record],
        }

    def _line(self, line: int) -> dict[str, Any]:
        columns = self._lines
        return {
            "comm": columns["comm"][line],
            "comm_id": columns["comm_id"][line],
            "line_bytes": columns["message_bytes"][line],
            "file": columns["file"][line],
            "line": columns["line"][line],
        }


def _torn_lines(ops: pa.Table) -> dict[tuple[int, str], list[str]]:
    """Where the torn lines of each process and operation are, as ``file:line``."""
    torn: dict[tuple[int, str], list[str]] = {}
    columns = (ops[name].to_pylist() for name in _TORN_COLUMNS)
    for state, op, pid, file, line in zip(*columns, strict=True):
        if state == "torn" and pid is not None:
            torn.setdefault((pid, op), []).append(f"{file}:{line}")
    return torn
