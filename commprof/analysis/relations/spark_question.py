"""Run a user's query on Spark: one SELECT over the tables and relations of a run, without access to other data.

Spark would read any file that a query names, run programs (TRANSFORM) and call Java methods (reflect).
Therefore Spark's parser reads the query first. The query may only contain the nodes below, name tables and
relations of the run, and use none of the refused functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from commprof.analysis.relations import relation_graph
from commprof.analysis.relations.evaluation import BY
from commprof.analysis.relations.spark import SparkRelations, first_line
from commprof.analysis.relations.sql_engine import MADE
from commprof.analysis.time.stalls import COLUMNS, stall_times, training_parts
from commprof.errors import TraceError, UsageError
from commprof.schema import TABLES
from commprof.trace.reader import Run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Classes of Spark's logical plans that read only their inputs.
_NODES: Final = frozenset(
    """
    Aggregate CTERelationDef CTERelationRef Deduplicate Distinct Except Expand Filter Generate GlobalLimit Intersect Join
    LateralJoin LocalLimit LocalRelation Offset OneRowRelation Pivot Project Sample Sort SubqueryAlias Tail Union
    UnresolvedHaving UnresolvedInlineTable UnresolvedPivot UnresolvedRelation UnresolvedSubqueryColumnAliases
    UnresolvedWith UnresolvedOrderBy Unpivot Window WithWindowDefinition
    """.split()  # noqa: SIM905
)
# These words are refused anywhere in the text. The functions call Java, read files, or hide a name from the parser.
_REFUSED: Final = frozenset(
    [
        "from_avro",
        "from_protobuf",
        "identifier",
        "java_method",
        "reflect",
        "to_avro",
        "to_protobuf",
        "try_reflect",
    ]
)
_KNOWN: Final = (*TABLES, *relation_graph.names(), *relation_graph.MADE)
_ON_ONE_MACHINE: Final = set(relation_graph.MADE) - {*MADE, "process_exposure"}


def query(session: SparkSession, run: Run, sql: str) -> pa.Table:
    """Return the answer of Spark to ``sql``, one SELECT over the tables and relations of ``run``.

    Args:
        session: The result of :func:`commprof.analysis.relations.spark.start`.

    Raises:
        UsageError: The query is not one SELECT, names anything else, or cannot be evaluated by Spark.
        TraceError: A file of the run is damaged.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if not hasattr(session, "_jsparkSession"):
        raise UsageError(
            "a Spark server (sc://) does not show how it parses a query, so unsafe queries cannot be refused; give "
            "the --master of a cluster (spark://...), or use --engine duckdb"
        )
    words = set(re.findall(r"\w+", sql.lower()))
    if words & _REFUSED:
        raise UsageError(
            f"the question cannot be answered: with the word {min(words & _REFUSED)!r} Spark could access data outside the "
            "run; leave it out"
        )
    try:
        named = _named(session, sql)
        if named & _ON_ONE_MACHINE:
            raise UsageError(
                f"Spark does not evaluate {min(named & _ON_ONE_MACHINE)!r}, which Python computes on one machine; "
                "use --engine duckdb"
            )
        needed = {
            table for name in named & set(relation_graph.names()) for table in relation_graph.tables_of(name)
        } | named
        tables = {name: run.scan(name) for name in sorted(needed & set(TABLES) | {"collectives"})}
        relations = SparkRelations(session, tables)
        by = BY if re.search(r"(select|,|\.)\s*\*", sql, re.IGNORECASE) else [x for x in BY if x in words]
        for name in sorted(named, key=lambda name: name in relation_graph.names()):
            if name == "process_exposure":
                parts = training_parts(run.table("steps"), run.table("outside_steps"))
                beside = {"steps": parts, "stalls": run.table("stalls")}
                relations.view(name, relations.of_processes(COLUMNS, beside, process_exposure)[0])
            else:
                relations.make(name, by)
        return _plain(relations.session.sql(sql).toArrow())
    except (PySparkException, Py4JError) as error:
        raise UsageError(_unanswered(first_line(error))) from None
    except pa.ArrowException as error:
        raise TraceError(f"{run.path} cannot be read by Spark: {error}") from None


def process_exposure(collectives: pa.Table, steps: pa.Table, stalls: pa.Table) -> list[pa.Table]:
    """Return the relation process_exposure over the records of some processes.

    This runs in a worker of Spark.
    """
    return [stall_times(collectives, steps, ("purpose",), stalls)]


def _unanswered(reason: str) -> str:
    relations = ", ".join((*relation_graph.names(), *relation_graph.MADE))
    return f"the question cannot be answered: {reason}. The tables are: {', '.join(TABLES)}. The relations are: {relations}"


def _named(session: SparkSession, sql: str) -> set[str]:
    """Return the tables and relations that ``sql`` names.

    Raises:
        UsageError: The query does more than read tables and relations.
        pyspark.errors.ParseException: The text is not SQL.
    """
    plan = session._jsparkSession.sessionState().sqlParser().parsePlan(sql)  # type: ignore[attr-defined]
    named: set[str] = set()
    own: set[str] = set()  # the names of common table expressions
    for node in _nodes(plan):
        kind = node.nodeName()
        name = type_name(node)
        if name not in _NODES:
            raise UsageError(
                f"Spark reads {kind} in this, and only one SELECT over the run is answered: select op, count(*) from "
                "collectives group by op"
            )
        if name == "UnresolvedRelation":
            named.add(".".join(_items(node.multipartIdentifier())))
        elif name == "UnresolvedWith":
            own |= {str(pair._1()).lower() for pair in _items(node.cteRelations())}
    named = {name.lower() for name in named}
    others = sorted(named - own - set(_KNOWN))
    if others:
        raise UsageError(_unanswered(f"the run has no table {others[0]!r}"))
    return named - own


def type_name(node: Any) -> str:
    """Return the name of the Scala class of ``node``."""
    return str(node.getClass().getSimpleName())


def _nodes(plan: Any) -> Iterator[Any]:
    """Yield ``plan`` and all its nodes: inputs, common table expressions, and queries within expressions."""
    yield plan
    for branches in (plan.children(), plan.innerChildren(), plan.subqueries()):
        for part in _items(branches):
            yield from _nodes(part)


def _items(sequence: Any) -> list[Any]:
    """Return the items of a Scala sequence."""
    return [sequence.apply(place) for place in range(sequence.size())]


def _plain(answer: pa.Table) -> pa.Table:
    """Return ``answer`` with integral decimals as 64-bit integers if they fit, as on DuckDB."""
    from commprof.analysis.relations.user_sql import with_integers

    return with_integers(answer)
