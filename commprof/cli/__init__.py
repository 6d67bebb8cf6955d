"""The command line: one module per verb, and what they share.

Modules of verbs import nothing heavy at their top, so that ``commprof --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from commprof.cli import console
from commprof.errors import CommprofError

INTERRUPTED = 130
BROKEN_PIPE = 141  # 128 + SIGPIPE, as the shell reports it


def main(argv: Sequence[str] | None = None) -> None:
    """Run the ``commprof`` command with ``argv`` (default: the process's own arguments) and exit."""
    try:
        code = execute(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at its end; let it go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    raise SystemExit(code)


def execute(argv: list[str]) -> int:
    """Carry out one command line and return its exit code; errors become one message on standard error."""
    from commprof.cli import application

    try:
        return application.invoke(argv)
    except CommprofError as error:
        console.error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        console.error("interrupted")
        return INTERRUPTED
