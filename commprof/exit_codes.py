"""The exit codes of the command: one table, and the function that decides how a comparison ends."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum, StrEnum
from typing import Final


class ExitCode(IntEnum):
    """What the command returns to the shell. ``commprof run`` returns the code of the program that it starts."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    CANNOT_TELL = 3
    LAUNCH_FAILED = 125
    INTERRUPTED = 130
    BROKEN_PIPE = 141  # 128 + SIGPIPE, as the shell reports it


class State(StrEnum):
    """How a comparison of a run with what was asked for ends."""

    CLOSED = "closed"  # every byte that was issued is explained, and nothing that was expected is missing
    MISMATCH = (
        "mismatch"  # some record has no explanation, some expectation no record, or two sources contradict
    )
    UNKNOWN = "unknown"  # what was asked for, or a part of what was issued, is not known


CODE_OF_STATE: Final[dict[State, ExitCode]] = {
    State.CLOSED: ExitCode.DONE,
    State.MISMATCH: ExitCode.FAILED,
    State.UNKNOWN: ExitCode.CANNOT_TELL,
}
# Generated into docs/cli.md.
MEANINGS: Final[dict[ExitCode, str]] = {
    ExitCode.DONE: "Success. `verify`: the ledger is closed. `check`: the run keeps to the budget.",
    ExitCode.FAILED: (
        "The command failed. `verify`: the ledger has a mismatch. `check`: the run breaks the budget, or the records do not "
        "suffice to show that it keeps to it. `sweep`: a run failed."
    ),
    ExitCode.USAGE: "The arguments, the config file or the budget file cannot be used.",
    ExitCode.CANNOT_TELL: "`verify`: the ledger has no mismatch, but a level or a part of the records is not known.",
    ExitCode.LAUNCH_FAILED: "`run`: commprof itself failed while it started or watched the program.",
    ExitCode.INTERRUPTED: "The command was interrupted (Ctrl-C).",
    ExitCode.BROKEN_PIPE: "The reader of standard output closed it.",
}


def decide(contradictions: Collection[object], doubts: Collection[object], *, whole: bool = True) -> State:
    """How a comparison ends: a contradiction outranks a doubt, but only where the records are whole.

    Args:
        contradictions: what has no explanation, is missing, or differs between two sources.
        doubts: what cannot be told.
        whole: no record was lost or left out. Otherwise a contradiction may come from the gap.
    """
    if not whole:
        return State.UNKNOWN
    if contradictions:
        return State.MISMATCH
    return State.UNKNOWN if doubts else State.CLOSED
