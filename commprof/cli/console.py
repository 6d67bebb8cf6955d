"""Prints messages of commprof on standard error. Standard output is for results and the user's program."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from commprof.printable import escaped


def say(text: str, below: Iterable[str] = ()) -> None:
    """Print ``text`` with the prefix ``commprof:`` on standard error, and then the lines ``below`` without a prefix."""
    _write(f"commprof: {text}")
    for line in below:
        _write(line)


def error(text: str) -> None:
    """Print ``text`` as an error of commprof on standard error."""
    _write(f"commprof: error: {text}")


def _write(line: str) -> None:
    try:
        print(escaped(line), file=sys.stderr, flush=True)
    except (OSError, ValueError):  # standard error is closed
        pass
