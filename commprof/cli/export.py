"""``commprof export``: the tables of a run for other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.rendering import Heading, Rows
from commprof.cli.runs import RunArgument, opened


class Format(StrEnum):
    """What can be written."""

    CSV = "csv"


def export(
    run: RunArgument,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Where the files go.", show_default=False)
    ],
    kind: Annotated[Format, typer.Option("--format", help="Kind of file.")] = Format.CSV,
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="NAME", help="Only this table; may be given several times."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace the files of an earlier export.")
    ] = False,
) -> int:
    """Write a run as files: <table>.csv for each table, a data dictionary, and where it all came from."""
    del kind  # there is one so far
    found = opened(run)
    with needed("export", "to export a run"):
        from commprof.export.csv import export_csv

        files = export_csv(found, out, tables or None, force)
    headings = (Heading("file"), Heading("rows", number=True), Heading("size", number=True))
    cells = [
        (file.path.name, rendering.count(file.rows), rendering.number_of_bytes(file.bytes)) for file in files
    ]
    rendering.show(Rows(headings, cells))
    say(f"{out}  {len(files)} files of {found.path}")
    return 0
