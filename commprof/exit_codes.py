"""The exit codes of the command, and the rule for the result of a comparison (closed, mismatch, unknown)."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum, StrEnum
from typing import Final


class ExitCode(IntEnum):
    """The exit code of the command. ``commprof run`` returns the exit code of the program that it starts."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    CANNOT_TELL = 3
    LAUNCH_FAILED = 125
    INTERRUPTED = 130
    BROKEN_PIPE = 141  # 128 + SIGPIPE, as the shell reports it


class State(StrEnum):
    """The result of comparing a run with its request."""

    # Every issued byte is explained, and nothing expected is missing.
    CLOSED = "closed"
    # A record has no explanation, an expectation has no record, or two sources contradict each other.
    MISMATCH = "mismatch"
    # The request, or a part of the issued operations, is not known.
    UNKNOWN = "unknown"


CODE_OF_STATE: Final[dict[State, ExitCode]] = {
    State.CLOSED: ExitCode.DONE,
    State.MISMATCH: ExitCode.FAILED,
    State.UNKNOWN: ExitCode.CANNOT_TELL,
}
# Generated into docs/cli.md.
MEANINGS: Final[dict[ExitCode, str]] = {
    ExitCode.DONE: "The command succeeded. `verify`: the ledger is closed. `check`: the run meets the budget.",
    ExitCode.FAILED: (
        "The command failed. `verify`: the ledger has a mismatch. `check`: the run exceeds the budget, or too few "
        "records exist to check it. `sweep`: a run failed."
    ),
    ExitCode.USAGE: "The arguments, the config file or the budget file cannot be used.",
    ExitCode.CANNOT_TELL: "`verify`: the ledger has no mismatch, but a level or a part of the records is not known.",
    ExitCode.LAUNCH_FAILED: "`run`: commprof itself failed while it started or watched the program.",
    ExitCode.INTERRUPTED: "The command was interrupted (Ctrl-C).",
    ExitCode.BROKEN_PIPE: "The reader of standard output closed the pipe.",
}


def decide(contradictions: Collection[object], doubts: Collection[object], *, complete: bool = True) -> State:
    """Return the result of a comparison: a contradiction outranks a doubt, but only if the records are complete.

    Args:
        contradictions: The items without an explanation, the missing items, and the differences between two sources.
        doubts: The items that are not known.
        complete: Whether no record was dropped or left out. Otherwise a gap may cause the contradiction.
    """
    if not complete:
        return State.UNKNOWN
    if contradictions:
        return State.MISMATCH
    return State.UNKNOWN if doubts else State.CLOSED
