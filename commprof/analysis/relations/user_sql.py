"""Run a user's query in DuckDB: one SELECT over the tables and relations of a run, without access to other data."""

from __future__ import annotations

import re

import duckdb
import pyarrow as pa

from commprof.analysis.relations import relation_graph
from commprof.analysis.relations.evaluation import RunViews
from commprof.errors import UsageError
from commprof.schema import TABLES
from commprof.trace.reader import Run


def query(run: Run, sql: str) -> pa.Table:
    """Return the answer to ``sql``, one read-only statement over the tables and relations of a run.

    The tables are documented in ``docs/schema.md``, and the relations in ``docs/relations.md``. The statement
    cannot access other files, extensions or the network, so a query from another person cannot do harm.

    Raises:
        UsageError: The statement is not one SELECT, names another table, or cannot be evaluated by DuckDB.
    """
    every_column = re.search(r"(select|,|\.)\s*\*", sql, re.IGNORECASE)
    views = RunViews(run, None if every_column else re.findall(r"\w+", sql.lower()))
    with views.engine as engine:
        try:
            statements = engine.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise UsageError(
                    f"{len(statements)} statements that are not one SELECT were given; ask one question: select op, "
                    "count(*) from collectives group by op"
                )
            for name in sorted(
                _named(engine, sql) & {*TABLES, *relation_graph.names(), *relation_graph.MADE}
            ):
                views.add(name)
            allowed = ", ".join("'" + file.replace("'", "''") + "'" for file in views.files)
            engine.execute(f"SET allowed_paths = [{allowed}]")
            engine.execute("SET enable_external_access = false; SET lock_configuration = true")
            return with_integers(engine.sql(sql).to_arrow_table())
        except duckdb.Error as error:
            reason = " ".join(str(error).split())
            raise UsageError(
                f"the question cannot be answered: {reason}. The tables are: {', '.join(TABLES)}. The relations are: "
                f"{', '.join((*relation_graph.names(), *relation_graph.MADE))}"
            ) from None


def _named(engine: duckdb.DuckDBPyConnection, sql: str) -> set[str]:
    """Return the tables that ``sql`` names, or all its words if DuckDB cannot bind it without the tables.

    Without the tables, DuckDB attributes an aggregate in a subquery next to a common table expression to an
    outer table.
    """
    try:
        return set(engine.get_table_names(sql))
    except duckdb.BinderException:
        return set(re.findall(r"\w+", sql.lower()))


def with_integers(answer: pa.Table) -> pa.Table:
    """Return ``answer`` with sums of integers as 64-bit integers if they fit.

    The sums are wider in DuckDB than in Arrow.
    """
    for place, item in enumerate(answer.schema):
        if pa.types.is_decimal(item.type) and item.type.scale == 0:
            try:
                answer = answer.set_column(place, item.name, answer.column(place).cast(pa.int64()))
            except pa.ArrowInvalid:
                continue
    return answer
