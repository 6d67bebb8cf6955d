"""Runs whose records a test changes, in order to plant faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from commprof.trace.tables import arrow_schema


class Changed:
    """A run in which ``change`` replaces each record by no record, one record or several records."""

    def __init__(self, run: Any, change: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> None:
        self.path, self.manifest, self.health = run.path, run.manifest, run.health
        self._run = run
        rows = [row for each in run.table("collectives").to_pylist() for row in change(dict(each))]
        self._records = pa.Table.from_pylist(rows, arrow_schema("collectives"))

    def table(self, name: str) -> pa.Table:
        """Return a table of the run, with the changed records."""
        return self._records if name == "collectives" else self._run.table(name)

    def parts(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the table ``name`` with the changed records, in one part."""
        table = self.table(name)
        yield table if columns is None else table.select(list(columns))
