"""The command line of commprof: one module for each verb, and shared modules.

The modules of the verbs import no large package at module level, so that ``commprof --help`` is fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from commprof.cli import console
from commprof.cli.interrupts import Interrupts
from commprof.errors import CommprofError
from commprof.exit_codes import ExitCode


def main(argv: Sequence[str] | None = None) -> None:
    """Run the ``commprof`` command with ``argv`` (default: the process's own arguments) and exit."""
    interrupts = Interrupts()
    try:
        interrupts.install()
        code = _execute_and_flush(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        console.error("interrupted")
        code = ExitCode.INTERRUPTED
    interrupts.finish()
    raise SystemExit(code)


def _execute_and_flush(argv: list[str]) -> int:
    if sys.stdout is None:  # standard output was closed before the start
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - until the process ends
    try:
        code = execute(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        code = ExitCode.BROKEN_PIPE
    except OSError as error:
        console.error(f"the output cannot be written: {error.strerror}")
        code = ExitCode.FAILED
    else:
        return code
    # Python flushes standard output once more at exit; redirect that to the null device.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def execute(argv: list[str]) -> int:
    """Run one command line and return its exit code. Print an error as one message on standard error."""
    try:
        from commprof.cli import application

        return application.invoke(argv)
    except CommprofError as error:
        console.error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        console.error("interrupted")
        return ExitCode.INTERRUPTED
