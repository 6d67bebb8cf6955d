"""Evaluate SQL over the tables of a run with DuckDB: relations (:mod:`.relation_graph`) and questions.

Relations have a name and a fixed meaning. Questions (``queries/*.sql``) have parameters and read relations.
Both use the SQL that DuckDB and Spark share: common table expressions, window frames, ``coalesce``,
``max_by``, but no QUALIFY, no quoted or reserved names, and no lists. Only starting the engine and
registering the tables is specific to DuckDB, and this module does both.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Final

import duckdb
import pyarrow as pa

from commprof.analysis.relations.memory import engine_settings
from commprof.analysis.relations.relation_graph import requested, statement, steps
from commprof.analysis.traffic.bucket_groups import bucket_groups
from commprof.errors import TraceError
from commprof.schema import parse_ranks
from commprof.trace.reader import Scan

_MOST_IDLE: Final = 8  # the dashboard asks in 8 threads; each engine has one thread per processor


class _Engines:
    """A pool of engines that answer one question after another, because a start takes longer than most questions.

    Any thread can use an idle engine, and no engine belongs to a thread. In a forked child, Python deletes
    objects that belong to other threads. The destructor of an engine waits for the threads of the engine,
    which do not exist in the child (a segmentation fault).
    """

    def __init__(self) -> None:
        self._idle: list[duckdb.DuckDBPyConnection] = []
        os.register_at_fork(after_in_child=self._leave)

    @contextmanager
    def one(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Return an engine for this question alone."""
        try:
            engine = self._idle.pop()
        except IndexError:
            engine = connect()
        yield engine
        # The engine is not reused after an error, because a new engine starts without the remains of the error.
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(engine)

    def _leave(self) -> None:
        """Start with new engines in a forked child, and never destroy the parent's engines."""
        for engine in self._idle:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
        self._idle = []


def connect(path: str = ":memory:", **settings: str) -> duckdb.DuckDBPyConnection:
    """Return an engine with a memory limit that spills data beyond the limit to files (``memory``).

    Args:
        path: The path of its database. Default: none.
        settings: Settings of DuckDB that replace the default settings.

    Raises:
        UsageError: The environment sets a limit that is not a size.
        duckdb.Error: The database cannot be opened.
    """
    return duckdb.connect(path, config={**engine_settings(), **settings})


_engines: Final = _Engines()
_AGREEMENT: Final = "agreement"
_DIFFERING: Final = "differing_operations"
_numbers: Final = itertools.count()


@cache
def query_text(question: str) -> str:
    """Return the SQL of ``queries/<question>.sql``."""
    return (resources.files("commprof.analysis") / "queries" / f"{question}.sql").read_text("utf-8")


def ask(question: str, tables: Mapping[str, pa.Table | Scan], **clauses: str) -> pa.Table:
    """Return the answer to ``question`` over ``tables``.

    Args:
        question: The name of a file in ``queries/`` without its suffix.
        tables: The tables that the SQL text uses, by name. A large table is a scan of its files.
        clauses: Texts that replace ``{name}`` in the query. They contain only checked column names.

    Raises:
        TraceError: The files of a table cannot be read, or contain numbers that cannot be summed.
    """
    text = query_text(question)
    return _answer(f"the question of {question!r}", text.format(**clauses) if clauses else text, tables)


def evaluate(
    name: str,
    tables: Mapping[str, pa.Table | Scan],
    by: Sequence[str] = (),
    known: Mapping[str, pa.Table] | None = None,
    select: str = "select * from {name}",
) -> pa.Table:
    """Return the rows of relation ``name`` over ``tables`` of the schema.

    Args:
        tables: The tables of :func:`commprof.analysis.relations.relation_graph.tables_of`, except those that
            this module computes.
        by: The columns that are requested of the relation.
        known: The rows of relations that the relation uses, already evaluated by at least the columns that it
            needs.
        select: The query over the relation. The query may also use ``tables``.

    Raises:
        TraceError: The files of a table cannot be read, or contain numbers that cannot be summed.
    """
    known = known or {}
    texts = " ".join(steps(name, by, known).values())
    derived = {
        table: made_of(table, lambda question: ask(question, tables))
        for table in MADE
        if table not in tables and re.search(rf"\b{table}\b", texts)
    }
    known_tables = {step: f"known_{step}" for step in known}
    registered = {**tables, **derived, **{known_tables[step]: rows for step, rows in known.items()}}
    return _answer(
        f"the relation {name!r}",
        "",
        registered,
        lambda engine: _evaluated(engine, name, by, known_tables, select),
    )


def _evaluated(
    engine: duckdb.DuckDBPyConnection,
    name: str,
    by: Sequence[str],
    known_tables: Mapping[str, str],
    select: str,
) -> pa.Table:
    agreement = keep_agreement(engine, name, by, known_tables)
    answer = f"answer_{next(_numbers)}"
    text = statement(name, by, select, {**known_tables, **agreement})
    try:
        # engine.sql(text) is not used, because it parses and plans a statement twice: for its columns and for the
        # evaluation.
        engine.execute(f"create temp table {answer} as {text}")
        return engine.table(answer).to_arrow_table()
    finally:
        for table in (answer, *agreement.values()):
            engine.execute(f"drop table if exists {table}")


def keep_agreement(
    engine: duckdb.DuckDBPyConnection, name: str, by: Sequence[str], known: Collection[str] = ()
) -> dict[str, str]:
    """Evaluate the part of the relation agreement that ``name`` needs into a temporary table.

    The result is an argument of :func:`statement`. The engine chooses a better join with the records if it
    knows the number of rows. With an estimate, the join takes several times the memory. If all ranks agree,
    differing_operations is also created as an empty table. The text of differing_operations is half of the
    text of operations, and planning it takes longer than evaluating the operations of a small run.

    Args:
        known: The relations that were already evaluated.
    """
    by = requested(name, by)
    needed = steps(name, by, known)
    if name == _AGREEMENT or _AGREEMENT not in needed:
        return {}
    number = next(_numbers)
    tables = {_AGREEMENT: f"{_AGREEMENT}_{number}"}
    engine.execute(f"create temp table {tables[_AGREEMENT]} as {statement(_AGREEMENT, by)}")
    disagreeing = engine.execute(f"select count(*) from {tables[_AGREEMENT]} where agree = 0").fetchone()
    if _DIFFERING in needed and name != _DIFFERING and disagreeing == (0,):
        tables[_DIFFERING] = f"{_DIFFERING}_{number}"
        engine.execute(
            f"create temp table {tables[_DIFFERING]} as select * exclude (agree), cast(null as int) as sender, "
            f"cast(null as int) as receiver, cast(null as bigint) as sent_bytes from {tables[_AGREEMENT]} where false"
        )
    return tables


def made_of(name: str, ask_records: Callable[[str], pa.Table]) -> pa.Table:
    """Return the table ``name`` of :data:`MADE`.

    Args:
        ask_records: A function that answers a question (``queries/*.sql``) about the collectives of the run.

    Raises:
        TraceError: A text contains no ranks.
    """
    question, make = MADE[name]
    return make(ask_records(question))


def group_members(groups: pa.Table) -> pa.Table:
    """Return the ranks of each text in ``groups`` (column group_ranks), with their positions in the text.

    Raises:
        TraceError: A text contains no ranks.
    """
    texts = groups["group_ranks"].to_pylist()
    rows = [(text, rank, place) for text in texts for place, rank in enumerate(parse_ranks(text))]
    columns = zip(*rows, strict=True) if rows else [()] * 3
    kinds = (pa.string(), pa.int32(), pa.int32())
    names = ["group_ranks", "rank", "position"]
    return pa.table([pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)], names)


# The question that each table needs, and the function that computes the table.
MADE: Final[Mapping[str, tuple[str, Callable[[pa.Table], pa.Table]]]] = {
    "bucket_groups": ("reducing_groups", bucket_groups),
    "group_members": ("split_groups", group_members),
    "ranks_of_groups": ("groups_of_operations", group_members),
}


def _answer(
    what: str,
    text: str,
    tables: Mapping[str, pa.Table | Scan],
    act: Callable[[duckdb.DuckDBPyConnection], pa.Table] | None = None,
) -> pa.Table:
    """Return the answer to ``text``, or the result of ``act``, with ``tables`` registered in the engine."""
    registered: list[str] = []
    try:
        with _engines.one() as engine:
            for name, rows in tables.items():
                registered += register(engine, name, rows)
            answer = engine.sql(text).to_arrow_table() if act is None else act(engine)
            for name in reversed(registered):
                engine.unregister(name)  # so that no table remains registered after its question
            return answer
    except duckdb.Error as error:
        first = str(error).strip().partition("\n")[0]
        raise TraceError(
            f"the {' and '.join(tables)} of the run do not answer {what}: {first}. Some file of the run is damaged; copy it "
            "again from where it was recorded"
        ) from None


def register(engine: duckdb.DuckDBPyConnection, name: str, rows: pa.Table | Scan) -> list[str]:
    """Register ``rows`` in ``engine`` as ``name``, and return the names that were registered."""
    if not isinstance(rows, Scan):
        engine.register(name, rows)
        return [name]
    rest = f"{name}_rest"
    engine.register(rest, rows.rest)
    engine.register(name, scanned(engine, rows, rest))
    return [rest, name]


def scanned(engine: duckdb.DuckDBPyConnection, rows: Scan, rest: str) -> duckdb.DuckDBPyRelation:
    """Return all rows of a table in files: the rows of the files, then the rows of ``rest``.

    Columns that are missing in the schema version of a file are null.

    Args:
        rest: The name of ``rows.rest`` in ``engine``.
    """
    others = engine.table(rest)
    files = engine.read_parquet([str(file) for file in rows.files], union_by_name=not rows.is_current)
    if not rows.is_current:
        present = set(files.columns)
        kinds = zip(others.columns, others.types, strict=True)
        files = files.project(
            ", ".join(name if name in present else f"cast(null as {kind}) as {name}" for name, kind in kinds)
        )
    return files.union(others)
