"""``commprof dump``: shows what every rank of a job waits for, and which rank delays the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from commprof.cli.console import say
from commprof.cli.runs import RunArgument
from commprof.errors import UsageError
from commprof.printable import escaped

HELP_ORDER = 200


def dump(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with exact times and bytes.")] = False,
    stacks: Annotated[
        bool,
        typer.Option("--stacks/--no-stacks", help="Also read the Python stacks of the ranks on this host."),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Write the dump to FILE and print only its first sentence."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace the file of --out if it exists.")
    ] = False,
) -> int:
    """Show which rank a hung job waits for, and the collective and the Python stacks of each rank.

    The job continues to run. For a job that was killed, the command shows the last state without stacks.
    """
    from commprof.sampling.dump_text import dump_text
    from commprof.sampling.job_dump import take_dump
    from commprof.trace.directory import resolve

    if out is not None and out.exists() and not force:
        raise UsageError(f"{out} exists already and is not overwritten without --force")
    taken = take_dump(resolve(run), stacks=stacks)
    text = json.dumps(taken.as_dict(), indent=1) + "\n" if as_json else dump_text(taken)
    if out is None:
        typer.echo(text if as_json else escaped(text, "\n"), nl=False)
        return 0
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from None
    say(taken.verdict.sentence)
    return 0
