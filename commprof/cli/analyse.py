"""``commprof analyse``: runs evaluated into directories that open as these runs, by DuckDB or on Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

import typer

from commprof.cli.console import say
from commprof.cli.engines import Engine, Master, spark_session
from commprof.cli.extras import needed
from commprof.cli.runs import each_path, opened
from commprof.errors import UsageError


def _local(text: str) -> str:
    """The path of a run of this machine, out of a path or a ``file://`` URL."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        return text
    if scheme == "file" and rest.startswith("/"):
        return unquote(rest)
    raise UsageError(
        f"{text} is not on this machine, and commprof analyse reads the small tables of a run here; copy or mount the run, "
        f"or evaluate relations of it in Python: SparkRelations(session, place={text!r}) (docs/scale.md)"
    )


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
    master: Master = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an earlier analysis.")] = False,
) -> int:
    """Evaluate what most answers begin with, once, into a directory that opens as the run.

    report, compare, dashboard and export take DIR in the place of the run. Its records are not copied; DIR/collectives is a
    link to them. --engine spark needs Java 17 and pip install 'commprof[spark]' (docs/scale.md).
    """
    session_of = spark_session(engine, master)
    paths = each_path([_local(text) for text in runs])
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
    session = session_of()
    for path, target in zip(paths, targets, strict=True):
        rows = analysed.analyse(opened(str(path)), target, session, force)
        counts = ", ".join(f"{number:,} {name}" for name, number in rows.items())
        say(f"{target}  {counts}")
    return 0
