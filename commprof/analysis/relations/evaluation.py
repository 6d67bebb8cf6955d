"""Register the tables and relations of a run in one DuckDB connection, each on first use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Final

import duckdb
import pyarrow as pa

from commprof.analysis.relations import relation_graph
from commprof.analysis.relations.sql_engine import (
    MADE,
    connect,
    keep_agreement,
    made_of,
    query_text,
    register,
)
from commprof.analysis.time.stalls import stall_times, training_parts
from commprof.errors import TraceError, UsageError
from commprof.schema import TABLES
from commprof.trace.reader import Run, Scan

BY: Final = (  # the columns by which relations can be summed
    "attempt",
    "step",
    "after_step",
    "micro_step",
    "phase",
    "op",
    "intended_op",
    "purpose",
    "bucket",
    "owner",
    "dtype",
    "reduce_op",
    "pg",
    "group_desc",
    "group_ranks",
    "group_size",
    "backend",
    "device",
    "api",
    "call_site",
    "root",
    "sender",
    "receiver",
    "call_bytes",
    relation_graph.SPAN,
)
_MOST_IN_MEMORY: Final = 100_000  # rows of a table; the engine reads larger tables from the files


class RunViews:
    """The tables and relations of a run in one connection.

    Args:
        by: The columns by which relations are summed. Fewer columns are faster. Default: :data:`BY`.

    Attributes:
        engine: The connection.
        files: The files of the tables that were not read into memory.
    """

    def __init__(self, run: Run, by: Collection[str] | None = None) -> None:
        self.engine = connect()
        self.files: list[str] = []
        self._run = run
        self._by = BY if by is None else tuple(name for name in BY if name in by)
        self._defined: set[str] = set()

    def add(self, name: str) -> None:
        """Register the table or relation ``name`` in the connection, with its inputs.

        Raises:
            UsageError: There is no table or relation with this name.
            TraceError: A file of the run cannot be read.
        """
        if name in self._defined:
            return
        self._defined.add(name)
        if name in TABLES:
            rows = self._run.scan(name, _MOST_IN_MEMORY)
            if isinstance(rows, Scan):
                self.files += map(str, rows.files)
            register(self.engine, name, rows)
        elif name in MADE:
            for table in ("collectives", "aggregates"):
                self.add(table)
            rows = made_of(name, lambda question: self.engine.sql(query_text(question)).to_arrow_table())
            self.engine.register(name, rows)
        elif name == "process_exposure":
            parts = training_parts(self._run.table("steps"), self._run.table("outside_steps"))
            records = self._run.scan("collectives", _MOST_IN_MEMORY)
            self.engine.register(name, stall_times(records, parts, ("purpose",), self._run.table("stalls")))
        elif name in relation_graph.MADE:
            self.engine.register(name, _made(self._run, name))
        elif name in relation_graph.names():
            for table in relation_graph.tables_of(name):
                self.add(table)
            text = relation_graph.statement(name, self._by, known=keep_agreement(self.engine, name, self._by))
            self.engine.execute(f"create temp view {name} as {text}")
        else:
            raise UsageError(_unknown(name))

    def relation(self, name: str, by: Sequence[str] | None = None) -> duckdb.DuckDBPyRelation:
        """Return the rows of table or relation ``name``, which are evaluated on demand.

        Args:
            by: The columns to sum by, for a relation that has them (``docs/relations.md``). Default:
                :data:`BY`.

        Raises:
            UsageError: There is no table or relation with this name, or no such column.
            TraceError: A file of the run cannot be read.
        """
        try:
            if by is None or name not in relation_graph.names():
                self.add(name)
                return self.engine.sql(f"select * from {name}")
            wrong = [column for column in by if column not in BY]
            if wrong:
                raise UsageError(f"{name} cannot be summed by {wrong[0]!r}; choose from {', '.join(BY)}")
            for table in relation_graph.tables_of(name):
                self.add(table)
            return self.engine.sql(
                relation_graph.statement(name, by, known=keep_agreement(self.engine, name, by))
            )
        except duckdb.Error as error:
            first = str(error).strip().partition("\n")[0]
            raise TraceError(f"{name} of {self._run.path} cannot be evaluated: {first}") from None


def _made(run: Run, name: str) -> pa.Table:
    """Return the table ``name`` of :data:`relation_graph.MADE`."""
    # Imported here, because most queries do not need these modules.
    from commprof.analysis.storage import index_sums, run_totals
    from commprof.analysis.stragglers import straggler_answers

    if name == "arrivals":
        return straggler_answers.arrival_table(run)
    if name == "transfers":
        return straggler_answers.times(run, None)
    return run_totals.exposure_rows(
        run, next(by for by, each in index_sums.EXPOSURES.items() if each == name)
    )


def _unknown(name: str) -> str:
    every = [*TABLES, *relation_graph.names(), *relation_graph.MADE]
    near = get_close_matches(name, every, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"a run has no table or relation {name!r}: {hint}the tables are {', '.join(TABLES)}; the relations are "
        + (", ".join((*relation_graph.names(), *relation_graph.MADE)))
    )
