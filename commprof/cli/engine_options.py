"""The options --engine and --master of commands that use DuckDB or Spark."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from commprof.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Engine(StrEnum):
    """The engine that evaluates the relations."""

    DUCKDB = "duckdb"
    SPARK = "spark"


Master: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="The Spark cluster. Default: the cluster of spark-submit, or all cores of this machine "
        "without spark-submit.",
        show_default=False,
    ),
]


def spark_session(engine: Engine, master: str | None) -> Callable[[], SparkSession | None]:
    """Return a function that starts and returns the requested Spark session, or returns None for DuckDB.

    Raises:
        UsageError: ``master`` is given, but the engine is not Spark.
    """
    if master is not None and engine is not Engine.SPARK:
        raise UsageError("--master applies to Spark only; add --engine spark")

    def start() -> SparkSession | None:
        if engine is not Engine.SPARK:
            return None
        from commprof.analysis.relations import spark

        return spark.start(master)

    return start
