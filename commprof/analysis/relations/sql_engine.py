"""Evaluates SQL over the tables of a run with DuckDB: relations (:mod:`.relation_graph`) and questions.

Relations have a name and a fixed meaning; questions (``queries/*.sql``) take parameters and read relations. Both use the SQL
that DuckDB and Spark share: common table expressions, window frames, ``coalesce``, ``max_by``; no QUALIFY, no quoted or
reserved names, no lists. Only starting the engine and registering the tables is specific to DuckDB; this module does that.
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

_MOST_IDLE: Final = 8  # each has a thread for each processor; the dashboard asks in 8 threads


class _Engines:
    """Engines that answer one question after another: starting one takes longer than most questions.

    Any thread takes an idle one. None belongs to a thread: Python deletes what belongs to other threads in a forked child,
    and the end of an engine waits for threads of its own, which the child does not have (a segmentation fault).
    """

    def __init__(self) -> None:
        self._idle: list[duckdb.DuckDBPyConnection] = []
        os.register_at_fork(after_in_child=self._leave)

    @contextmanager
    def one(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """An engine for this question alone."""
        try:
            engine = self._idle.pop()
        except IndexError:
            engine = connect()
        yield engine
        # Not after an error: a new one starts without what that has left.
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(engine)

    def _leave(self) -> None:
        """In a forked child: begin with new engines, and never end those of the parent."""
        for engine in self._idle:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
        self._idle = []


def connect(path: str = ":memory:", **settings: str) -> duckdb.DuckDBPyConnection:
    """An engine with a memory limit that spills the rest to files (``memory``).

    Args:
        path: of its database; default: none.
        settings: of DuckDB, replacing the default ones.

    Raises:
        UsageError: the environment sets a limit that is no size. duckdb.Error: the database cannot be opened.
    """
    return duckdb.connect(path, config={**engine_settings(), **settings})


_engines: Final = _Engines()
_AGREEMENT: Final = "agreement"
_DIFFERING: Final = "differing_operations"
_numbers: Final = itertools.count()


@cache
def query_text(question: str) -> str:
    """The SQL of ``queries/<question>.sql``."""
    return (resources.files("commprof.analysis") / "queries" / f"{question}.sql").read_text("utf-8")


def ask(question: str, tables: Mapping[str, pa.Table | Scan], **clauses: str) -> pa.Table:
    """The answer to ``question`` over ``tables``.

    Args:
        question: name of a file in ``queries/``.
        tables: the tables that its text names, by name; a large one as a scan of its files.
        clauses: texts that replace ``{name}`` in the query; they contain checked column names only.

    Raises:
        TraceError: the files of a table cannot be read, or hold numbers that cannot be summed.
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
    """The rows of relation ``name`` over ``tables`` of the schema.

    Args:
        tables: those of :func:`commprof.analysis.relations.relation_graph.tables_of`, except those that this module makes.
        by: the columns that are requested of it.
        known: rows of relations that it uses, evaluated before by the columns that it needs at least.
        select: the question to ask of it; it may name ``tables`` too.

    Raises:
        TraceError: the files of a table cannot be read, or hold numbers that cannot be summed.
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
        # Not engine.sql(text), which parses and plans a statement twice: for its columns, and to evaluate it.
        engine.execute(f"create temp table {answer} as {text}")
        return engine.table(answer).to_arrow_table()
    finally:
        for table in (answer, *agreement.values()):
            engine.execute(f"drop table if exists {table}")


def keep_agreement(
    engine: duckdb.DuckDBPyConnection, name: str, by: Sequence[str], known: Collection[str] = ()
) -> dict[str, str]:
    """Evaluate the part of the relation agreement that ``name`` needs into a temporary table, for :func:`statement`.

    With the known number of rows the engine chooses a better join with the records; with an estimate it takes several times
    the memory. Where all ranks agree, differing_operations is an empty table too: its text is half of that of operations,
    and planning it takes longer than evaluating the operations of a small run.

    Args:
        known: relations that were evaluated before.
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
    """The table ``name`` of :data:`MADE`.

    Args:
        ask_records: answers a question (``queries/*.sql``) about the collectives of the run.

    Raises:
        TraceError: a text has no ranks.
    """
    question, make = MADE[name]
    return make(ask_records(question))


def group_members(groups: pa.Table) -> pa.Table:
    """The ranks of each text of ``groups`` (column group_ranks), with their positions in it.

    Raises:
        TraceError: a text has no ranks.
    """
    texts = groups["group_ranks"].to_pylist()
    rows = [(text, rank, place) for text in texts for place, rank in enumerate(parse_ranks(text))]
    columns = zip(*rows, strict=True) if rows else [()] * 3
    kinds = (pa.string(), pa.int32(), pa.int32())
    names = ["group_ranks", "rank", "position"]
    return pa.table([pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)], names)


# The question that each needs, and the function that makes it.
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
    """The answer to ``text``, or the result of ``act``, with ``tables`` in the engine."""
    registered: list[str] = []
    try:
        with _engines.one() as engine:
            for name, rows in tables.items():
                registered += register(engine, name, rows)
            answer = engine.sql(text).to_arrow_table() if act is None else act(engine)
            for name in reversed(registered):
                engine.unregister(name)  # so that no table outlives its question
            return answer
    except duckdb.Error as error:
        first = str(error).strip().partition("\n")[0]
        raise TraceError(
            f"the {' and '.join(tables)} of the run do not answer {what}: {first}. Some file of the run is damaged; copy it "
            "again from where it was recorded"
        ) from None


def register(engine: duckdb.DuckDBPyConnection, name: str, rows: pa.Table | Scan) -> list[str]:
    """Make ``rows`` known to ``engine`` as ``name``; returns the names that this uses."""
    if not isinstance(rows, Scan):
        engine.register(name, rows)
        return [name]
    rest = f"{name}_rest"
    engine.register(rest, rows.rest)
    engine.register(name, scanned(engine, rows, rest))
    return [rest, name]


def scanned(engine: duckdb.DuckDBPyConnection, rows: Scan, rest: str) -> duckdb.DuckDBPyRelation:
    """All rows of a table in files: those of the files, then those of ``rest``, the name of ``rows.rest`` in ``engine``.

    Columns that a file's version of the schema did not have are null.
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
