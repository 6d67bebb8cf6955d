"""Reads the commands of a tutorial page and the output that the page shows for them.

A page contains indented blocks of commands. Each of them is followed by indented blocks of output. A block
below a comment ``<!-- not run: REASON -->`` is not run. A line ``...`` in shown output marks omitted output.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

COMMANDS = ("commprof", "python", "sudo")
LEFT_OUT = "..."
# Values that differ between machines and runs: times and percentages.
_MEASURED = re.compile(r"\d[\d.,]*(?: \+-[\d.,]+)? (?:ns|us|ms|s|%)(?!\w)")


class Step(NamedTuple):
    """A command as a list of words, and the output that the page shows for it."""

    words: list[str]
    shown: str
    not_run: str | None


def steps(page: Path) -> list[Step]:
    """Return the commands of ``page`` in order, with their shown output."""
    found: list[Step] = []
    reason: str | None = None
    for block in re.split(r"\n{2,}", page.read_text("utf-8")):
        if told := re.fullmatch(r"<!-- not run: (.*) -->", block.strip()):
            reason = told.group(1)
        elif block.startswith("    "):
            text = "\n".join(line[4:] for line in block.splitlines())
            if text.split()[0] in COMMANDS:
                lines = text.replace("\\\n", " ").splitlines()
                found += [Step(shlex.split(line, comments=True), "", reason) for line in lines]
            else:
                found[-1] = found[-1]._replace(shown=f"{found[-1].shown}\n{LEFT_OUT}\n{text}")
            reason = None
    return found


def plain(text: str) -> str:
    """Return ``text`` without measured times, lines of tables and column widths."""
    return _MEASURED.sub("TIME", " ".join(re.sub(r"─+", "", text).split()))


def missing(shown: str, output: str) -> str | None:
    """Return the first part of ``shown`` that ``output`` does not contain in this order; None if all are present."""
    rest = plain(output)
    for part in re.split(rf"^{re.escape(LEFT_OUT)}$", shown, flags=re.MULTILINE):
        if wanted := plain(part):
            _, found, rest = rest.partition(wanted)
            if not found:
                return part
    return None
