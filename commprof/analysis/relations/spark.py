"""Evaluate relations on Spark with the SQL texts that DuckDB runs, for runs that are too large for one machine.

The tables of a run become temporary views over their files. A relation that other relations use more than
once is evaluated once and stored by Spark (``localCheckpoint``). Without this, Spark evaluates a common table
expression again at each use, and optimizing ``operations`` as one statement would take minutes.
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
    """Return the Spark session of this process. The session is started if there is none.

    Args:
        master: The URL of the cluster. Default: the cluster of ``spark-submit``, else all cores of this
            machine.
        settings: Settings of Spark that replace the default settings.

    Raises:
        MissingExtraError: pyspark is not installed.
        UsageError: There is no Java, or Spark does not start.
    """
    # PySpark prints this warning for every pandas from 3.0 on, but relations do not use pandas.
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
    # Without this, Spark's workers run the python3 on PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
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
    # This logger of PySpark prints the exception a second time.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        with _quiet_start():
            return builder.getOrCreate()
    except Exception as error:  # Py4J, the JVM and the cluster raise many types
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
    """Return whether Spark finds a Java to start."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=os.path.join(home, "bin") if home else None) is not None  # noqa: PTH118


def _is_submitted() -> bool:
    return "PYSPARK_GATEWAY_PORT" in os.environ


class SparkRelations:
    """The tables and relations of one run in a separate Spark session.

    Args:
        session: The result of :func:`start`. Each run gets its own session, so that views of several runs do
            not collide.
        tables: The tables in memory or in files of this machine. Other tables are empty.
        place: A directory that Spark reads (``s3a://...``), with the structure of a run. Tables that are not
            in ``tables`` are read from there.
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
        """Return the rows of relation ``name``, with the columns and types that DuckDB returns.

        Args:
            by: The columns that are requested of the relation.
            known: The rows of relations that the relation uses, already evaluated by at least the columns
                that it needs.

        Raises:
            TraceError: A table cannot be read, or contains numbers that cannot be summed.
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
                    if rows.isEmpty():  # then Spark does not have to plan its inputs
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
            by: The columns that are requested of the relation.

        Raises:
            TraceError: A table cannot be read.
        """
        if name in relation_graph.names():
            self.evaluate(name, by).createOrReplaceTempView(name)
        else:
            with explained(_relation(name)):
                self._add(name)

    def table(
        self, name: str, by: Sequence[str] = (), known: Mapping[str, pa.Table] | None = None
    ) -> pa.Table:
        """Return the rows of relation ``name``, in memory: see :meth:`evaluate`.

        Raises:
            TraceError: A table cannot be read, or contains numbers that cannot be summed.
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
        """Return the concatenated results of ``function`` for each process.

        ``function`` gets the collectives of the process and its rows of the tables ``beside``. It runs where
        Spark runs, so commprof must be installed there. Spark shuffles the ``columns`` of the collectives.

        Args:
            function: A module-level function, because Spark sends it by name. Its arguments are the records
                and the tables ``beside``.

        Raises:
            TraceError: The collectives cannot be read, or ``function`` cannot process them.
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
        table = rows.combine_chunks()  # PySpark 4.3 creates no rows if the first chunk of a table is empty
        return self.session.createDataFrame(table.replace_schema_metadata(None), fields)

    def _nothing(self, fields: str) -> DataFrame:
        """Return a table without rows, which Spark knows to be empty when it plans a query."""
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
        """Read files of table ``name``. Columns that are missing in the schema version of a file are null."""
        columns = ", ".join(f"{column.name} {_TYPES[column.type]}" for column in TABLES[name].columns)
        return self.session.read.schema(columns).option("mergeSchema", "false").parquet(*places)


def relations_of(session: SparkSession, run: Run) -> SparkRelations:
    """Return the relations of an opened run.

    Small tables are read from memory. Spark reads the files of large tables.
    """
    names = {table for name in relation_graph.names() for table in relation_graph.tables_of(name)} - set(
        relation_graph.MADE
    )
    there = elsewhere(run.path)
    if there is not None:
        names -= {"collectives"}
    place = there.place if there is not None else None
    return SparkRelations(session, {name: run.scan(name) for name in sorted(names)}, place)


def _by_process(tables: Mapping[str, pa.Table]) -> pa.Table:
    """Return one row per process that contains its packed rows of each of ``tables``."""
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
    """Call ``function`` on the collectives of one process and its row of :func:`_by_process`.

    This runs in a worker of Spark.
    """
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
    """Return the columns and types of relation ``name`` as DuckDB evaluates it."""
    # Tables that Python computes depend on the others.
    named = ("collectives", *relation_graph.tables_of(name))
    tables = {table: empty_table(table) for table in named if table in TABLES}
    return evaluate_by_duckdb(name, tables, by).schema


def _uses(step: str, texts: Mapping[str, str]) -> int:
    """Return how often the texts use ``step``, including uses through aliases."""
    uses = 0
    for text in texts.values():
        named = len(re.findall(rf"(?:from|join) {step}\b", text))
        for alias in re.findall(rf"(\w+) as \(select \* from {step}\)", text):
            named += len(re.findall(rf"(?:from|join) {alias}\b", text)) - 1
        uses += named
    return uses


def _as(schema: pa.Schema, rows: DataFrame) -> DataFrame:
    """Return ``rows`` with the types of ``schema``.

    This is needed because the engines choose different widths for a literal or a sum.
    """
    from pyspark.sql.functions import col

    return rows.select([col(field.name).cast(_type(field.type)).alias(field.name) for field in schema])


def _type(kind: pa.DataType) -> str:
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return _ARROW_TYPES[str(kind)]


def _url(path: str) -> str:
    """Return the URL of a file of this machine.

    Spark interprets a bare path as a path on the cluster, and ``[`` as the start of a pattern.
    """
    return "file://" + re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def _relation(name: str) -> str:
    return f"the relation {name!r} cannot be evaluated on Spark"


@contextlib.contextmanager
def explained(failure: str) -> Iterator[None]:
    """Report an error of Spark in one line: ``failure``, the reason, and the possible cause."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise TraceError(
            f"{failure}: {first_line(error)}. Some file of the run is missing or damaged, or cannot be read where Spark runs"
        ) from None


def first_line(error: BaseException) -> str:
    """Return the reason in the text of an error of Spark."""
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:  # from a Python worker: the last line contains the reason
        raised = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception): ", line)]
        text = raised[-1] if raised else text
    return " ".join(text.partition("\n")[0].split())[:400]
