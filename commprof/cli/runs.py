"""The run directories that a command is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commprof.cli.extras import needed

if TYPE_CHECKING:
    from commprof.trace.reader import Run

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory, or 'latest'.", show_default=False)
]


def opened(text: str) -> Run:
    """The run that ``text`` names.

    Raises:
        TraceError: there is none, or it cannot be read.
        MissingExtraError: the packages that read tables are not installed.
    """
    from commprof.trace.directory import resolve

    path = resolve(text)
    with needed("analysis", "to read a run"):
        from commprof.trace.reader import open_run

        return open_run(path)


def each_opened(texts: list[str]) -> list[Run]:
    """The runs that ``texts`` name, each once; a directory that holds several stands for all of them."""
    from commprof.trace.directory import find_runs, is_run, resolve

    found: dict[Path, Path] = {}
    for text in texts:
        path = Path(text)
        below = [] if text == "latest" or not path.is_dir() or is_run(path) else find_runs(path)
        for run in below or [resolve(text)]:
            found.setdefault(run.resolve(), run)
    return [opened(str(run)) for run in found.values()]
