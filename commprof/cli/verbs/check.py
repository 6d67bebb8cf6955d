"""``commprof check``: checks a run against a budget, for continuous integration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.runs import RunArgument, opened
from commprof.errors import UsageError
from commprof.printable import command_line

HELP_ORDER = 80


def check(
    run: RunArgument,
    budget: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The TOML file with the limits (docs/verify.md).", show_default=False
        ),
    ] = None,
    write_budget: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the tightest budget that this run meets.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the violations as JSON.")] = False,
) -> int:
    """Check a run against a budget: bytes and collectives per step, allowed operations, unrequested messages.

    The exit code is 0 if the run meets the budget. It is 1 if the run exceeds the budget, or if the
    records do not suffice to check the budget.
    """
    if (budget is None) == (write_budget is None):
        raise UsageError(
            f"give one of --budget FILE, which checks {run}, and --write-budget FILE, which writes the tightest budget that "
            f"{run} meets"
        )
    if write_budget is not None:
        return _write(run, write_budget)
    with needed("analysis", "to check a run"):
        from commprof.ledger.budget import violations
        from commprof.ledger.limits import read_budget
    limits = read_budget(Path(str(budget)))
    opened_run = opened(run)
    broken = violations(opened_run, limits)
    if as_json:
        rendering.show_json(
            {
                "run": str(opened_run.path),
                "budget": str(budget),
                "holds": not broken,
                "violations": [violation._asdict() for violation in broken],
            }
        )
    elif broken:
        lines = [f"{violation.key}: {violation.text}" for violation in broken]
        if sys.stdout.isatty():
            lines = [rendering.paragraph(line) for line in lines]
        limits_are = f"limit of {budget} is" if len(lines) == 1 else f"limits of {budget} are"
        rendering.show(*lines, f"{opened_run.path}: {len(lines)} {limits_are} broken")
    else:
        rendering.show(f"{opened_run.path} keeps to {budget}")
    return 1 if broken else 0


def _write(run: str, path: Path) -> int:
    if path.exists():
        raise UsageError(f"{path} exists already and is not overwritten; choose another name or remove it")
    opened_run = opened(run)
    with needed("analysis", "to check a run"):
        from commprof.ledger.budget import budget_of
    text = budget_of(opened_run)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another place") from None
    say(f"{path}  next: {command_line('check', 'RUN', '--budget', path)}")
    return 0
