"""``commprof import``: what another tool recorded, as a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.errors import UsageError
from commprof.printable import command_line

FORMATS = ("flight-recorder", "kineto", "inspector", "deepspeed")


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="The files that the tool wrote, one per rank or process, or their directory.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="The run directory to make.", show_default=False),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="FORMAT", help=f"{', '.join(FORMATS)}. Default: told by the content."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an earlier run in --out.")] = False,
) -> int:
    """Make a run of what another tool recorded: report, compare, export and the dashboard read it like any other.

    Reads dumps of torch's Flight Recorder, traces of torch.profiler, logs of the NCCL Inspector and of DeepSpeed's comms
    logger. No code from a pickle is ever run. What a tool did not record stays empty, and the report says so.
    """
    if kind is not None and kind not in FORMATS:
        raise UsageError(f"--format {kind}: one of {', '.join(FORMATS)} was expected")
    with needed("analysis", "to import a recording"):
        from commprof.imports.formats import Format, import_files
    found = import_files(files, out, None if kind is None else Format(kind), force)
    count = sum(len(rank.collectives) for rank in found.ranks)
    say(
        f"imported {count} operations of {len(found.ranks)} ranks from {found.tool} into {out}  "
        f"next: {command_line('report', out)}"
    )
    for note in found.notes:
        say(f"note: {note}")
    return 0
