"""Reads the ``.events`` file of a rank: JSON lines, whose last line may be truncated. Standard library only."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from commprof.errors import TraceError
from commprof.trace.content import open_content, printable
from commprof.trace.rank_files.layout import EVENT_KINDS
from commprof.trace.rank_files.splits import SplitSignature

_INTERNED: Final = frozenset({"signature", "tag", "site", "thread", "bucket"})
_MOST_EVENT_BYTES: Final = 4 << 30
_LARGEST_ID: Final = (1 << 32) - 1


@dataclass(slots=True)
class Events:
    """The rows of one events file by kind, and ``torn``, the number of lines that could not be read."""

    rows: dict[str, list[Any]] = field(default_factory=lambda: {kind: [] for kind in EVENT_KINDS})
    torn: int = 0
    _interned: dict[str, dict[int, Mapping[str, Any]]] = field(
        default_factory=lambda: {kind: {} for kind in _INTERNED}
    )

    def interned(self, kind: str) -> dict[int, Mapping[str, Any]]:
        """Return the interned rows of ``kind`` by id."""
        return self._interned[kind]

    def last(self, kind: str) -> dict[str, Any] | None:
        """Return the last row of ``kind``, or None."""
        rows = self.rows[kind]
        return rows[-1] if rows else None

    def add(self, line: bytes) -> None:
        """Add one line. A malformed line increments ``torn``. A line of an unknown kind is ignored."""
        try:
            row = json.loads(line)
            kind = row.pop("kind")
            if b"\\u" in line:
                row = printable(row)
            if kind in _INTERNED:
                self._intern(kind, row)
            elif kind == "flush":
                self.rows["buckets"].append({**self._interned["bucket"][row.pop("id")], **row})
            elif kind in self.rows:
                self.rows[kind].append(row)
            elif not isinstance(kind, str):
                raise ValueError("kind")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.torn += 1

    def _intern(self, kind: str, row: Mapping[str, Any]) -> None:
        if "like" in row:
            row = SplitSignature(self._interned[kind][row["like"]], row)
        number = row["id"]
        if type(number) is not int or not 0 < number <= _LARGEST_ID:
            raise ValueError("id")
        # A number is assigned once. If two rows have the same number, records may already refer to the first row.
        if self._interned[kind].setdefault(number, row) != row:
            raise ValueError("id")
        self.rows[kind].append(row)


def read_events(path: Path) -> Events:
    """Read all rows of ``path``. The result is empty if there is no such file.

    Raises:
        TraceError: The file cannot be read.
    """
    try:
        with open_content(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > _MOST_EVENT_BYTES:
                raise TraceError(
                    f"{path} holds {size:,} bytes, more than the {_MOST_EVENT_BYTES:,} that are read: it is damaged"
                )
            return _parse(stream)
    except FileNotFoundError:
        return Events()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None


def parse_events(data: bytes) -> Events:
    """Parse the rows in ``data``. A malformed line is counted in ``torn`` and left out."""
    return _parse(io.BytesIO(data))


def _parse(lines: Iterable[bytes]) -> Events:
    events = Events()
    for line in lines:
        if line.endswith(b"\n"):
            events.add(line)
        else:
            events.torn += 1  # the write was truncated
    return events
