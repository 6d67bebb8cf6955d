"""``commprof analyse``: runs evaluated into directories that open as these runs, by DuckDB or on Spark."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.runs import each_path, opened
from commprof.errors import UsageError


class Engine(StrEnum):
    """What evaluates."""

    DUCKDB = "duckdb"
    SPARK = "spark"


def analyse(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Run directories, directories of runs, or 'latest'.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Where it goes; several runs each get a directory in it.",
            show_default=False,
        ),
    ],
    engine: Annotated[Engine, typer.Option("--engine", help="What evaluates the relations.")] = Engine.DUCKDB,
    master: Annotated[
        str | None,
        typer.Option(
            "--master",
            metavar="URL",
            help="Spark cluster; default: that of spark-submit, else all cores of this machine.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an earlier analysis.")] = False,
) -> int:
    """Evaluate what most answers begin with, once, into a directory that opens as the run.

    report, compare, dashboard and export take DIR in the place of the run. Its records are not copied; DIR/collectives is a
    link to them. --engine spark needs Java 17 and pip install 'commprof[spark]' (docs/scale.md).
    """
    if master is not None and engine is not Engine.SPARK:
        raise UsageError("--master is of Spark; give --engine spark with it")
    paths = each_path(runs)
    names = [path.resolve().name for path in paths]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"several runs are named {twice[0]}, and each needs a directory of its own; analyse one at a time"
        )
    targets = [out] if len(paths) == 1 else [out / name for name in names]
    with needed("analysis", "to analyse a run"):
        from commprof.analysis import analysed
    for target in targets:
        analysed.check_target(target, force)
    session = None
    if engine is Engine.SPARK:
        from commprof.analysis.relations import spark

        session = spark.start(master)
    for path, target in zip(paths, targets, strict=True):
        rows = analysed.analyse(opened(str(path)), target, session, force)
        counts = ", ".join(f"{number:,} {name}" for name, number in rows.items())
        say(f"{target}  {counts}")
    return 0
