"""``commprof paper``: draws figures and LaTeX tables from the CSV files of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commprof.cli.console import say
from commprof.cli.extras import needed

HELP_ORDER = 140


def paper(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="CSV_DIR",
            help="The directory of the CSV files that commprof export RUN... wrote.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="The directory for the files.", show_default=False),
    ],
    font: Annotated[
        str,
        typer.Option(
            "--font", metavar="FONT", help="sans, serif (similar to Times), or an installed font family."
        ),
    ] = "sans",
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace the files of an earlier call.")
    ] = False,
) -> int:
    """Make figures (PDF, SVG) and LaTeX tables from the CSV files of an export.

    The figures show traffic, step time and loss. Each figure is written in two widths, one column and
    two columns. The figures have embedded fonts and are readable without color. The tables show the
    comparison and the traffic. They are one column wide and use the rules of booktabs. The file
    sources.json lists the sources of figures and tables.
    """
    with needed("export", "to make figures"):
        from commprof.export.paper_export import write_paper

        files = write_paper(directory, out, force, font=font)
    say(f"{out}  {len(files)} files: {', '.join(file.path.name for file in files)}")
    return 0
