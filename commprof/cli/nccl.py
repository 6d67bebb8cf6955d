"""``commprof nccl``: what NCCL's own log says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Read the logs that NCCL_DEBUG=INFO writes.", no_args_is_help=True)


@app.command("parse")
def parse(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="Log files, of one or of several ranks.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the table is written.")],
) -> int:
    """Turn NCCL log lines into the table nccl_ops."""
    raise NotImplementedError
