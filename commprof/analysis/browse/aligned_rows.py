"""Queries that count, sort and page the rows of an alignment without loading all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commprof.analysis.relations.memory import engine_settings
from commprof.analysis.relations.sql_engine import connect, query_text
from commprof.analysis.storage.answer_cache import answer_cache
from commprof.errors import TraceError
from commprof.printable import command_line
from commprof.trace.reader import Run, Scan
from commprof.trace.tables import arrow_schema

_EVERY: Final = "true"
_ORDERED: Final = "order by rank nulls last, coalesce(pg, ''), position"
_APART: Final = """exists (
    select 1 from placed a
    where a.state <> 'matched' and a.rank is not distinct from p.rank and a.pg is not distinct from p.pg
)"""
# The engine's memory limit in bytes. With this limit, it sorts an alignment of 1e7 lines in files.
_MOST_MEMORY: Final = 512 << 20
_FEWEST_SCANNED: Final = 100_000  # tables with more rows are queried in their files


class Order(NamedTuple):
    """The rows of one rank and group in order: their row numbers in the table ``matches`` and their states as text."""

    numbers: npt.NDArray[np.int64]
    states: pa.DictionaryArray

    def of_state(self, state: str | None) -> npt.NDArray[np.int64]:
        """Return the positions of the rows in ``state``, or of all rows if ``state`` is None."""
        if state is None:
            return np.arange(len(self.numbers))
        names = self.states.dictionary.to_pylist()
        if state not in names:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.states.indices.to_numpy() == names.index(state))


class AlignedRows:
    """Queries over the table ``matches`` of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def counts(self) -> pa.Table:
        """Return the number of rows by rank, group, operation and state, as columns rank, pg, op, state and lines."""
        return self._places(
            _EVERY,
            "select rank, pg, op, state, count(*) as lines from placed group by rank, pg, op, state "
            "order by rank nulls last, pg nulls last, op, state",
        )

    def every(self) -> pa.Table:
        """Return all rows in order, with the columns of :meth:`shown`."""
        return self.shown(self._places(_EVERY, f"select number, rank, pg, position from numbered {_ORDERED}"))

    def first_apart(self) -> pa.Table:
        """Return the first row of each rank and group that is not matched, with the columns of :meth:`shown`."""
        return self.shown(
            self._places(
                _APART,
                "select min_by(number, position) as number, rank, pg, min(position) as position from numbered "
                "where state <> 'matched' group by rank, pg",
            )
        )

    def order(self, rank: int | None, pg: str | None) -> Order:
        """Return the rows of one rank and group, in order."""
        return answer_cache.get(self._run.state, ("order", rank, pg), lambda: self._order(rank, pg))

    def _order(self, rank: int | None, pg: str | None) -> Order:
        lines = self._places(
            "p.rank is not distinct from cast($rank as integer) and p.pg is not distinct from cast($pg as varchar)",
            "select number, state from numbered order by position",
            {"rank": rank, "pg": pg},
        )
        states = lines["state"].combine_chunks().dictionary_encode()
        return Order(lines["number"].to_numpy().astype(np.int64), states)

    def place(self, rank: int, attempt: int, pid: int, seq: int) -> tuple[int | None, str | None, int] | None:
        """Return the rank, group and position of the first row of a record, or None if the record has no row."""
        lines = self._places(
            _EVERY,
            "select m.pg, min_by(m.file_row_number, coalesce(m.part, 0)) as number from matches m "
            "where m.rank = $rank and m.attempt = $attempt and m.record_pid = $pid and m.seq = $seq group by m.pg",
            {"rank": rank, "attempt": attempt, "pid": pid, "seq": seq},
        ).to_pylist()
        if not lines:
            return None
        at = np.flatnonzero(self.order(rank, lines[0]["pg"]).numbers == lines[0]["number"])
        return (rank, lines[0]["pg"], int(at[0])) if len(at) else None

    def shown(self, chosen: pa.Table) -> pa.Table:
        """Return rows with the columns of their record and their line.

        Args:
            chosen: The rows to return, as columns number, rank, pg and position.
        """
        with self._engine() as engine:
            for name in ("collectives", "nccl_ops"):  # large tables from which few rows are needed
                rows = (
                    self._run.scan(name, _FEWEST_SCANNED) if len(chosen) else arrow_schema(name).empty_table()
                )
                _register(engine, name, rows)
            engine.register("chosen", chosen)
            numbers = chosen["number"].to_numpy()
            first, last = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
            return engine.sql(query_text("aligned").format(first=first, last=last)).to_arrow_table()

    def _places(self, chosen: str, answer: str, values: Mapping[str, Any] | None = None) -> pa.Table:
        with self._engine() as engine:
            engine.register("comm_matches", self._run.table("comm_matches"))
            text = query_text("alignment_places").format(chosen=chosen, answer=answer)
            return engine.sql(text, params=dict(values) if values else None).to_arrow_table()

    @contextmanager
    def _engine(self) -> Iterator[duckdb.DuckDBPyConnection]:
        try:
            with connect(**engine_settings(_MOST_MEMORY)) as engine:
                _register(engine, "matches", self._run.scan("matches"), numbered=True)
                yield engine
        except duckdb.Error as error:
            message = str(error).strip().partition("\n")[0]
            raise TraceError(
                f"the alignment of the run cannot be read: {message}. Make it again: {command_line('align', self._run.path)}"
            ) from None


def _register(
    engine: duckdb.DuckDBPyConnection, name: str, rows: pa.Table | Scan, *, numbered: bool = False
) -> None:
    if isinstance(rows, Scan):
        files = engine.read_parquet([str(file) for file in rows.files], file_row_number=numbered)
        engine.register(name, files)
        return
    number = pa.array(np.arange(len(rows)))
    engine.register(name, rows.append_column("file_row_number", number) if numbered else rows)
