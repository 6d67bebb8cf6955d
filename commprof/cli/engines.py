"""The options --engine and --master of the commands that DuckDB or Spark carries out."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from commprof.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Engine(StrEnum):
    """What evaluates."""

    DUCKDB = "duckdb"
    SPARK = "spark"


Master: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="Spark cluster; default: that of spark-submit, else all cores of this machine.",
        show_default=False,
    ),
]


def spark_session(engine: Engine, master: str | None) -> Callable[[], SparkSession | None]:
    """What starts the session of Spark that the options ask for; it gives None for DuckDB.

    Raises:
        UsageError: there is a master, and the engine is not Spark.
    """
    if master is not None and engine is not Engine.SPARK:
        raise UsageError("--master is of Spark; give --engine spark with it")

    def start() -> SparkSession | None:
        if engine is not Engine.SPARK:
            return None
        from commprof.analysis.relations import spark

        return spark.start(master)

    return start
