"""Reading a rank's ``.events`` file: JSON lines, of which the last may be cut off. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from commprof.errors import TraceError
from commprof.trace.layout import EVENT_KINDS

_INTERNED: Final = frozenset({"signature", "tag", "site", "thread"})
_MOST_EVENT_BYTES: Final = 4 << 30


@dataclass(slots=True)
class Events:
    """The rows of one events file by kind, and how many lines could not be read."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {kind: [] for kind in EVENT_KINDS})
    torn: int = 0

    def interned(self, kind: str) -> dict[int, dict[str, Any]]:
        """The interned rows of ``kind`` by id."""
        return {row["id"]: row for row in self.rows[kind]}

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last row of ``kind``."""
        rows = self.rows[kind]
        return rows[-1] if rows else None


def read_events(path: Path) -> Events:
    """All rows of ``path``; none when there is no such file.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Events()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    return parse_events(data)


def parse_events(data: bytes) -> Events:
    """The rows in ``data``. A line that is not one of our rows is counted in ``torn`` and left out."""
    events = Events()
    lines = data.split(b"\n")
    if lines[-1]:
        events.torn += 1  # no line feed: the write was cut off
    for line in lines[:-1]:
        try:
            row = json.loads(line)
            kind = row.pop("kind")
            if kind in _INTERNED and not isinstance(row["id"], int):
                raise ValueError("id")
            events.rows[kind].append(row)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            events.torn += 1
    return events
