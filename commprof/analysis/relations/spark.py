"""Evaluates relations on Spark with the SQL texts that DuckDB runs, for runs that are too large for one machine.

The tables of a run become temporary views over their files. A relation that another one names more than once is evaluated
once and stored by Spark (``localCheckpoint``): Spark evaluates a common table expression again at each use, and optimising
``operations`` as one statement would take minutes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from commprof.analysis.relations import relation_graph
from commprof.analysis.relations.memory import limit_bytes
from commprof.analysis.relations.sql_engine import MADE, made_of, query_text
from commprof.analysis.relations.sql_engine import evaluate as evaluate_by_duckdb
from commprof.analysis.time.stalls import PROCESS, by_process
from commprof.errors import MissingExtraError, TraceError, UsageError
from commprof.schema import TABLES
from commprof.trace.directory import COLLECTIVES_DIRECTORY, elsewhere
from commprof.trace.reader import Run, Scan
from commprof.trace.tables import arrow_schema, empty_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOCAL: Final = "local[*]"
_TYPES: Final = {
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float64": "double",
    "bool": "boolean",
    "string": "string",
}
_ARROW_TYPES: Final = {**_TYPES, "double": "double", "bool": "boolean", "binary": "binary"}
_JAVA: Final = "Java 17 or newer"


def start(master: str | None = None, settings: Mapping[str, str] | None = None) -> SparkSession:
    """The Spark session of this process; it is started when there is none.

    Args:
        master: URL of the cluster; default: that of ``spark-submit``, else all cores of this machine.
        settings: of Spark, replacing the default ones.

    Raises:
        MissingExtraError: pyspark is not installed. UsageError: there is no Java, or Spark does not start.
    """
    # It says so of every pandas from 3.0 on; relations do not pass through pandas.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise MissingExtraError("pyspark", "spark", "to evaluate relations on Spark") from None
    chosen = master or (None if _is_submitted() else LOCAL)
    is_remote = (chosen or "").startswith("sc://")
    if not has_java() and not is_remote:
        raise UsageError(
            f"Spark needs {_JAVA}, and no java is in JAVA_HOME or on PATH; install it (Debian: apt-get install "
            "openjdk-17-jre-headless), or use --engine duckdb"
        )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else its workers are the python3 on PATH
    builder = SparkSession.builder.appName("commprof")
    usual: dict[str, str] = {
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    if chosen is not None and not is_remote:
        builder = builder.master(chosen)
    if (chosen or "").startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        usual |= {
            "spark.driver.memory": f"{limit_bytes() >> 20}m",
            "spark.driver.host": "localhost",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
        }
    if is_remote:
        builder, usual = SparkSession.builder.remote(chosen), {}
    for name, value in {**usual, **(settings or {})}.items():
        builder = builder.config(name, value)
    # This logger of PySpark repeats the exception.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        with _quiet_start():
            return builder.getOrCreate()
    except Exception as error:  # whatever Py4J, the JVM or the cluster say
        raise UsageError(f"Spark does not start at {chosen}: {first_line(error)}") from None


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Discard what the JVM prints on standard error: six lines about itself at its start."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def has_java() -> bool:
    """Whether Spark finds a Java to start."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=os.path.join(home, "bin") if home else None) is not None  # noqa: PTH118


def _is_submitted() -> bool:
    return "PYSPARK_GATEWAY_PORT" in os.environ


class SparkRelations:
    """The tables and relations of one run in a Spark session of their own.

    Args:
        session: of :func:`start`. Each run gets a session of its own, so that views of several runs do not collide.
        tables: the tables in memory or in files of this machine; others are empty.
        place: a directory that Spark reads (``s3a://...``), in the form of a run; tables that ``tables`` lacks are read
            there.
    """

    def __init__(
        self,
        session: SparkSession,
        tables: Mapping[str, pa.Table | Scan] | None = None,
        place: str | None = None,
    ) -> None:
        self.session = session.newSession() if hasattr(session, "newSession") else session
        self._tables = tables or {}
        self._place = place
        self._defined: set[str] = set()

    def evaluate(
        self, name: str, by: Sequence[str] = (), known: Mapping[str, pa.Table] | None = None
    ) -> DataFrame:
        """The rows of relation ``name``, with the columns and types that DuckDB returns.

        Args:
            by: the columns that are requested of it.
            known: rows of relations that it is made of, evaluated before by the columns that it needs at least.

        Raises:
            TraceError: a table cannot be read, or holds numbers that cannot be summed.
        """
        with explained(_relation(name)):
            for table in relation_graph.tables_of(name):
                self._add(table)
            for step, evaluated in (known or {}).items():
                self.view(step, evaluated)
            texts = relation_graph.steps(name, by, known or {})
            for step, text in texts.items():
                if step == name:
                    break
                rows = self.session.sql(text)
                if _uses(step, texts) > 1:
                    rows = rows.localCheckpoint()
                    if rows.isEmpty():  # its inputs need no plan
                        rows = self._nothing(
                            ", ".join(
                                f"{field.name} {field.dataType.simpleString()}" for field in rows.schema
                            )
                        )
                rows.createOrReplaceTempView(step)
            return _as(schema_of(name, by), self.session.sql(texts[name]))

    def make(self, name: str, by: Sequence[str] = ()) -> None:
        """Register the table or relation ``name`` in the session.

        Args:
            by: the columns that are requested of it.

        Raises:
            TraceError: a table cannot be read.
        """
        if name in relation_graph.names():
            self.evaluate(name, by).createOrReplaceTempView(name)
        else:
            with explained(_relation(name)):
                self._add(name)

    def table(
        self, name: str, by: Sequence[str] = (), known: Mapping[str, pa.Table] | None = None
    ) -> pa.Table:
        """The rows of relation ``name``, in memory: see :meth:`evaluate`.

        Raises:
            TraceError: a table cannot be read, or holds numbers that cannot be summed.
        """
        rows = self.evaluate(name, by, known)
        with explained(_relation(name)):
            return rows.toArrow().cast(schema_of(name, by))

    def of_processes(
        self,
        columns: Sequence[str],
        beside: Mapping[str, pa.Table],
        function: Callable[..., list[pa.Table]],
    ) -> list[pa.Table]:
        """The concatenated results of ``function`` on the collectives of each process and its rows of the tables ``beside``.

        It runs where Spark runs: commprof has to be installed there. The ``columns`` of the collectives are shuffled.

        Args:
            function: a module-level function, since it is sent by name; takes the records and the tables ``beside``.

        Raises:
            TraceError: the collectives cannot be read, or ``function`` cannot work on them.
        """
        from pyspark.sql.functions import col

        rows = [name for name in TABLES["collectives"].names if name in {*PROCESS, *columns}]
        with explained(_relation(function.__name__)):
            self._add("collectives")
            records = self.session.table("collectives").select([col(name) for name in rows])
            others = self._frame(_by_process(beside))
            pairs = records.groupBy(*PROCESS).cogroup(others.groupBy(*PROCESS))
            work = partial(_of_process, function, rows, tuple(beside))
            results = pairs.applyInArrow(work, "place int, rows binary").toArrow()
        tables: dict[int, list[pa.Table]] = {}
        for place, content in zip(results["place"].to_pylist(), results["rows"].to_pylist(), strict=True):
            tables.setdefault(place, []).append(_unpacked(content))
        if not tables:
            none = [empty_table("collectives").select(rows), *(part.slice(0, 0) for part in beside.values())]
            return function(*none)
        return [pa.concat_tables(tables[place]) for place in sorted(tables)]

    def _add(self, name: str) -> None:
        """Make table ``name`` a view."""
        if name in self._defined:
            return
        if name in MADE:
            for table in ("collectives", "aggregates"):
                self._add(table)
            self.view(name, made_of(name, lambda question: self.session.sql(query_text(question)).toArrow()))
        elif self._place is not None and name not in self._tables:
            self._read(name)
        else:
            self._register(name)
        self._defined.add(name)

    def view(self, name: str, rows: pa.Table) -> None:
        """Register ``rows`` in the session as ``name``."""
        self._frame(rows).createOrReplaceTempView(name)

    def _frame(self, rows: pa.Table) -> DataFrame:
        fields = ", ".join(f"{field.name} {_type(field.type)}" for field in rows.schema)
        if not len(rows):
            return self._nothing(fields)
        table = rows.combine_chunks()  # PySpark 4.3 makes no rows of a table whose first chunk is empty
        return self.session.createDataFrame(table.replace_schema_metadata(None), fields)

    def _nothing(self, fields: str) -> DataFrame:
        """A table without rows, which Spark knows to be empty when it plans."""
        kinds = (field.split(" ", 1) for field in fields.split(", "))
        columns = ", ".join(f"cast(null as {kind}) as {name}" for name, kind in kinds)
        return self.session.sql(f"select {columns} where false")

    def _register(self, name: str) -> None:
        rows = self._tables.get(name)
        if not isinstance(rows, Scan):
            self.view(name, empty_table(name) if rows is None else rows)
            return
        files = self._parquet(name, [_url(str(file)) for file in rows.files])
        (files.unionByName(self._frame(rows.rest)) if len(rows.rest) else files).createOrReplaceTempView(name)

    def _read(self, name: str) -> None:
        folder = COLLECTIVES_DIRECTORY if name == "collectives" else f"{name}.parquet"
        try:
            rows = self._parquet(name, [f"{self._place}/{folder}"])
        except Exception as error:
            if "PATH_NOT_FOUND" not in str(error) or name == "collectives":
                raise
            self.view(name, empty_table(name))
        else:
            rows.createOrReplaceTempView(name)

    def _parquet(self, name: str, places: list[str]) -> DataFrame:
        """Files of table ``name``; columns that their version of the schema did not have are null."""
        columns = ", ".join(f"{column.name} {_TYPES[column.type]}" for column in TABLES[name].columns)
        return self.session.read.schema(columns).option("mergeSchema", "false").parquet(*places)


def relations_of(session: SparkSession, run: Run) -> SparkRelations:
    """The relations of an opened run: small tables come from memory, and Spark reads the files of large ones."""
    names = {table for name in relation_graph.names() for table in relation_graph.tables_of(name)} - set(
        relation_graph.MADE
    )
    there = elsewhere(run.path)
    if there is not None:
        names -= {"collectives"}
    place = there.place if there is not None else None
    return SparkRelations(session, {name: run.scan(name) for name in sorted(names)}, place)


def _by_process(tables: Mapping[str, pa.Table]) -> pa.Table:
    """One row per process: its rows of each of ``tables``, packed."""
    packed: dict[tuple[int, ...], dict[str, bytes]] = {}
    for name, rows in tables.items():
        for part, key in by_process(rows):
            packed.setdefault(key, {})[name] = _packed(part)
    none = {name: _packed(rows.slice(0, 0)) for name, rows in tables.items()}
    columns: dict[str, pa.Array] = {
        name: pa.array([key[place] for key in packed], pa.int64()) for place, name in enumerate(PROCESS)
    }
    columns |= {
        name: pa.array([part.get(name, none[name]) for part in packed.values()], pa.binary())
        for name in tables
    }
    return pa.table(columns)


def _of_process(
    function: Callable[..., list[pa.Table]],
    columns: Sequence[str],
    names: Sequence[str],
    records: pa.Table,
    beside: pa.Table,
) -> pa.Table:
    """Runs in a worker of Spark on the collectives of one process and its row of :func:`_by_process`."""
    results: list[pa.Table] = []
    if len(records):
        schema = arrow_schema("collectives")
        typed = records.select(columns).cast(pa.schema([schema.field(name) for name in columns]))
        others = [_unpacked(beside[name][0].as_py()) if len(beside) else empty_table(name) for name in names]
        results = function(typed, *others)
    content = [_packed(table) for table in results]
    return pa.table(
        {"place": pa.array(range(len(content)), pa.int32()), "rows": pa.array(content, pa.binary())}
    )


def _packed(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue())


def _unpacked(content: bytes) -> pa.Table:
    return pa.ipc.open_stream(content).read_all()


def schema_of(name: str, by: Sequence[str] = ()) -> pa.Schema:
    """The columns and types of relation ``name`` as DuckDB evaluates it."""
    named = ("collectives", *relation_graph.tables_of(name))  # tables that Python makes depend on the others
    tables = {table: empty_table(table) for table in named if table in TABLES}
    return evaluate_by_duckdb(name, tables, by).schema


def _uses(step: str, texts: Mapping[str, str]) -> int:
    """How often the texts name ``step``, aliases included."""
    uses = 0
    for text in texts.values():
        named = len(re.findall(rf"(?:from|join) {step}\b", text))
        for alias in re.findall(rf"(\w+) as \(select \* from {step}\)", text):
            named += len(re.findall(rf"(?:from|join) {alias}\b", text)) - 1
        uses += named
    return uses


def _as(schema: pa.Schema, rows: DataFrame) -> DataFrame:
    """``rows`` with the types of ``schema``: the engines choose the width of a literal or of a sum differently."""
    from pyspark.sql.functions import col

    return rows.select([col(field.name).cast(_type(field.type)).alias(field.name) for field in schema])


def _type(kind: pa.DataType) -> str:
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return _ARROW_TYPES[str(kind)]


def _url(path: str) -> str:
    """The URL of a file of this machine: Spark takes a bare path to be one of the cluster's, and ``[`` for a pattern."""
    return "file://" + re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def _relation(name: str) -> str:
    return f"the relation {name!r} cannot be evaluated on Spark"


@contextlib.contextmanager
def explained(failure: str) -> Iterator[None]:
    """Report an error of Spark in one line: ``failure``, the reason, and what the cause may be."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise TraceError(
            f"{failure}: {first_line(error)}. Some file of the run is missing or damaged, or cannot be read where Spark runs"
        ) from None


def first_line(error: BaseException) -> str:
    """The reason in the text of an error of Spark."""
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:  # of a Python worker: its last line has the reason
        raised = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception): ", line)]
        text = raised[-1] if raised else text
    return " ".join(text.partition("\n")[0].split())[:400]
