"""Messages of commprof on standard error; standard output is for results and the user's program."""

from __future__ import annotations

import sys

from commprof.printable import escaped


def say(text: str) -> None:
    """Print ``text`` on standard error, marked as commprof's."""
    _write(f"commprof: {text}")


def error(text: str) -> None:
    """Print ``text`` on standard error, marked as an error of commprof."""
    _write(f"commprof: error: {text}")


def _write(line: str) -> None:
    try:
        print(escaped(line), file=sys.stderr, flush=True)
    except (OSError, ValueError):  # standard error is closed
        pass
