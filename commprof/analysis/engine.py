"""Asks one question of the tables of a run, in SQL.

The questions stand in ``queries/*.sql``, in a subset of SQL that DuckDB and Spark both understand: common table
expressions, window frames, ``coalesce``, ``max_by``; no QUALIFY, no quoted or reserved names, no lists. Only
registering the tables and starting the engine is particular to DuckDB, and that is all this module does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Final

import duckdb
import pyarrow as pa


class _Connection(threading.local):
    """One engine for each thread: starting one takes longer than most questions."""

    def __init__(self) -> None:
        self.engine = duckdb.connect()


_connection: Final = _Connection()


@cache
def query_text(question: str) -> str:
    """The SQL of ``question``, as it stands in ``queries/<question>.sql``."""
    return (resources.files("commprof.analysis") / "queries" / f"{question}.sql").read_text("utf-8")


def ask(question: str, tables: Mapping[str, pa.Table], **clauses: str) -> pa.Table:
    """The answer to ``question`` over ``tables``.

    Args:
        question: name of a file in ``queries/``.
        tables: the tables that its text names, by that name.
        clauses: text to put in the place of ``{name}`` in the query; made of checked column names only.
    """
    text = query_text(question)
    engine = _connection.engine
    try:
        for name, table in tables.items():
            engine.register(name, table)
        return engine.sql(text.format(**clauses) if clauses else text).to_arrow_table()
    finally:
        for name in tables:
            engine.unregister(name)  # so that no table outlives its question
