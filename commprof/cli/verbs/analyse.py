"""``commprof analyse``: evaluates runs with DuckDB or Spark, into directories that open as these runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

import typer

from commprof.cli.console import say
from commprof.cli.engine_options import Engine, Master, spark_session
from commprof.cli.extras import needed
from commprof.cli.runs import each_path, opened
from commprof.errors import UsageError

HELP_ORDER = 170


def _place(text: str) -> tuple[str, bool]:
    """Return the place of a run, and whether the place is a URL that is not local.

    The place is a path if ``text`` is a path or a ``file://`` URL, and otherwise the URL.
    """
    scheme, mark, rest = text.partition("://")
    if not mark:
        return text, False
    if scheme == "file" and rest.startswith("/"):
        return unquote(rest), False
    return text.rstrip("/"), True


def analyse(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, directories of runs, or 'latest'. With --engine spark, also URLs that "
            "Spark can read.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="The output directory. With several runs, it contains one directory for each run.",
            show_default=False,
        ),
    ],
    engine: Annotated[
        Engine, typer.Option("--engine", help="The engine that evaluates the relations.")
    ] = Engine.DUCKDB,
    master: Master = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an earlier analysis.")] = False,
) -> int:
    """Evaluate the common relations of runs once, and store them in a directory that opens like a run.

    You can pass the directory DIR of --out, instead of the run, to the commands report, compare,
    dashboard and export.

    The records are not copied: DIR/collectives is a link to the records. Records that only Spark can
    read (s3a://...) stay where they are. The option --engine spark requires Java 17 or newer and
    pip install 'commprof[spark]' (docs/scale.md).
    """
    session_of = spark_session(engine, master)
    places = [_place(text) for text in runs]
    stores = [text for text, is_url in places if is_url]
    if stores and engine is not Engine.SPARK:
        raise UsageError(
            f"{stores[0]} is not on this machine, and DuckDB reads local files only; add --engine spark"
        )
    paths: list[Path | str] = [
        *each_path([text for text, is_url in places if not is_url]),
        *dict.fromkeys(stores),
    ]
    names = [path.rpartition("/")[2] if isinstance(path, str) else path.resolve().name for path in paths]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"several runs are named {twice[0]}, and each needs a directory of its own; analyse one at a time"
        )
    targets = [out] if len(paths) == 1 else [out / name for name in names]
    with needed("analysis", "to analyse a run"):
        from commprof.analysis.storage import analysed
    # Check all targets before the first evaluation, which may take minutes.
    for target in targets:
        analysed.check_target(target, force)
    session = session_of()
    for path, target in zip(paths, targets, strict=True):
        if session is not None and isinstance(path, str):
            rows = analysed.analyse_place(path, target, session, force)
        else:
            rows = analysed.analyse(opened(str(path)), target, session, force)
        counts = ", ".join(f"{number:,} {name}" for name, number in rows.items())
        say(f"{target}  {counts}")
    return 0
