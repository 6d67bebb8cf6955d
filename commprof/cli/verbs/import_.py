"""``commprof import``: converts the files of another tool to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.errors import UsageError
from commprof.printable import command_line

HELP_ORDER = 150

FORMATS = ("flight-recorder", "kineto", "inspector", "deepspeed")


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="The files that the tool wrote, one per rank or process, or the directory of these files.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="The run directory to create.", show_default=False),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help=f"One of {', '.join(FORMATS)}. Default: detected from the content.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace an earlier run in the directory of --out.")
    ] = False,
) -> int:
    """Convert the files of another tool to a run. The commands report, compare and export and the dashboard can read it.

    The command reads dumps of torch's Flight Recorder, traces of torch.profiler, logs of the NCCL
    Inspector, and logs of DeepSpeed's comms logger. Code in a pickle is never run. Values that a tool
    does not record stay empty, and the report lists them.
    """
    if kind is not None and kind not in FORMATS:
        raise UsageError(f"--format {kind}: one of {', '.join(FORMATS)} was expected")
    with needed("analysis", "to import a recording"):
        from commprof.imports.formats import Format, import_files
    recording = import_files(files, out, None if kind is None else Format(kind), force)
    count = sum(len(rank.collectives) for rank in recording.ranks)
    say(
        f"imported {count} operations of {len(recording.ranks)} ranks from {recording.tool} into {out}  "
        f"next: {command_line('report', out)}"
    )
    for note in recording.notes:
        say(f"note: {note}")
    return 0
