"""Messages of commprof on standard error; standard output is for results and the user's program."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from commprof.printable import escaped


def say(text: str, below: Iterable[str] = ()) -> None:
    """Print ``text`` on standard error, marked as commprof's, and the lines ``below`` it as they are."""
    _write(f"commprof: {text}")
    for line in below:
        _write(line)


def error(text: str) -> None:
    """Print ``text`` on standard error, marked as an error of commprof."""
    _write(f"commprof: error: {text}")


def _write(line: str) -> None:
    try:
        print(escaped(line), file=sys.stderr, flush=True)
    except (OSError, ValueError):  # standard error is closed
        pass
