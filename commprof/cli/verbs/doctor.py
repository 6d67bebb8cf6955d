"""``commprof doctor``: shows what is installed, and what would and would not be recorded here, and why."""

from __future__ import annotations

import itertools
import textwrap
from typing import Annotated

import typer

from commprof.cli import rendering

HELP_ORDER = 210


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show what is installed, what commprof can and cannot record on this machine, and why.

    The exit code is 1 if commprof can record nothing on this machine.
    """
    from commprof.cli.sections.diagnosis import Finding, Level, diagnose

    def lines(finding: Finding) -> str:
        mark = "" if finding.section == "not recorded" else finding.level
        return textwrap.fill(
            finding.text, 98, initial_indent=f"  {mark:<6}", subsequent_indent=" " * 8, break_on_hyphens=False
        )

    findings = diagnose()
    faults = [finding for finding in findings if finding.level is Level.FAULT]
    if as_json:
        rendering.show_json(
            {"findings": [finding._asdict() for finding in findings], "can_record": not faults}
        )
        return 1 if faults else 0
    for section, group in itertools.groupby(findings, key=lambda finding: finding.section):
        rendering.show(section, *map(lines, group), "")
    rendering.show(
        "Nothing can be recorded here." if faults else "Recording works here. Try: commprof run train.py"
    )
    return 1 if faults else 0
