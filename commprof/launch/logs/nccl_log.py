"""Chooses the NCCL_DEBUG variables that make NCCL write a log for the alignment. Keeps the user's values. Pure.

NCCL defines the variables (``src/debug.cc``). Lines of operations have subsystem COLL and level INFO. CALL lines have
level TRACE. Only INIT lines name ranks. Each process truncates its log file when it opens the file. So two processes
with the same file name overwrite each other's log.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

LEVEL: Final = "NCCL_DEBUG"
SUBSYSTEMS: Final = "NCCL_DEBUG_SUBSYS"
FILE: Final = "NCCL_DEBUG_FILE"
DIRECTORY: Final = "nccl"  # the name of the log directory in the run
WANTED_SUBSYSTEMS: Final = ("INIT", "COLL", "CALL", "TUNING")
_VARIABLES: Final = (LEVEL, SUBSYSTEMS, FILE)
# Each level includes the levels before it.
_LEVELS: Final = ("NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE")
_LOST_WITHOUT: Final = {
    "INIT": "which rank a communicator's address stands for",
    "COLL": "the lines of operations",
    "CALL": "the lines of API calls",
    "TUNING": "algorithm and protocol",
}


class Mode(StrEnum):
    """The values of ``--nccl-log``."""

    AUTO = "auto"  # request a log if a GPU is visible
    ON = "on"
    OFF = "off"


class Request(NamedTuple):
    """The variables for the log of NCCL.

    Attributes:
        mode: The value of ``--nccl-log``.
        set: The variables that commprof sets for the ranks.
        left: The variables that the user has set.
        warnings: A sentence for each part of the log that is missing because of the user's variables.
    """

    mode: Mode
    set: dict[str, str]
    left: dict[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def own_file(self) -> str | None:
        """The user's own NCCL_DEBUG_FILE, whose files are copied into the run."""
        return None if self.mode is Mode.OFF else self.left.get(FILE)

    def described(self) -> dict[str, Any]:
        """Return the request as JSON values for the manifest."""
        return {"mode": str(self.mode), "set": self.set, "left": self.left, "warnings": list(self.warnings)}

    def sentences(self, shown_run: str) -> list[str]:
        """Return a line with the variables that are set and left unchanged, and a line for each warning.

        Args:
            shown_run: The run directory as messages show it.
        """
        if not self.set and not self.warnings:
            return []
        shown = {**self.set, FILE: f"{shown_run}/{DIRECTORY}/{_FILE_NAME}"} if FILE in self.set else self.set
        actions = [f"set {_listed(shown)}"] if self.set else []
        if self.left:
            actions.append(f"left as you set it: {_listed(self.left)}")
        off = " (--nccl-log off sets nothing)" if self.set else ""
        return [f"NCCL log: {'; '.join(actions)}{off}", *(f"warning: {text}" for text in self.warnings)]


_FILE_NAME: Final = "%h.%p.log"


def request(environment: Mapping[str, str], run: Path, mode: Mode, *, gpus: bool) -> Request:
    """Choose the variables for the ranks of ``run``.

    A variable that the user has set, in the environment or in the NCCL configuration file, is not changed. An empty
    variable counts as not set.

    Args:
        environment: The environment of the ranks with the user's configuration file (see :func:`with_user_file`).
        run: The run directory.
        mode: The value of ``--nccl-log``.
        gpus: Whether the ranks see a GPU. Without a GPU, NCCL is not used, and the mode ``auto`` sets no variable.
    """
    user_values = {name: environment[name] for name in _VARIABLES if environment.get(name)}
    if mode is Mode.OFF or (mode is Mode.AUTO and not gpus):
        return Request(mode, {}, user_values)
    wanted = {
        LEVEL: "TRACE",
        SUBSYSTEMS: ",".join(WANTED_SUBSYSTEMS),
        FILE: f"{str(run.absolute()).replace('%', '%%')}/{DIRECTORY}/{_FILE_NAME}",
    }
    return Request(
        mode,
        {name: value for name, value in wanted.items() if name not in user_values},
        user_values,
        tuple(_losses(user_values)),
    )


def with_user_file(environment: Mapping[str, str], text: str) -> dict[str, str]:
    """Return ``environment`` with the variables of the user's NCCL configuration file that it does not set.

    ``text`` is the content of the file, which has NAME=VALUE lines.
    """
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {**{name: value for name, equals, value in pairs if equals}, **environment}


def user_file(environment: Mapping[str, str]) -> str:
    """Return the text of the user's NCCL configuration file; empty if there is no such file.

    The file is NCCL_CONF_FILE, or else ``~/.nccl.conf``.
    """
    home = environment.get("HOME")
    named = environment.get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home else "")
    try:
        return Path(named).read_text(errors="replace") if named else ""
    except OSError:
        return ""


def subsystems(text: str) -> frozenset[str]:
    """Return the ``WANTED_SUBSYSTEMS`` that a value of NCCL_DEBUG_SUBSYS enables.

    The value is a list, ALL, or ``^`` and a list of exceptions.
    """
    inverted = text.startswith("^")
    named = {word.strip().upper() for word in text.removeprefix("^").split(",")}
    on = frozenset(name for name in WANTED_SUBSYSTEMS if name in named or "ALL" in named)
    return frozenset(WANTED_SUBSYSTEMS) - on if inverted else on


def _losses(user_values: Mapping[str, str]) -> list[str]:
    """Return a sentence for each part of the log that is missing because of the user's values."""
    level = user_values.get(LEVEL, "TRACE").upper()
    rank = _LEVELS.index(level) if level in _LEVELS else 0
    sentences = []
    if rank < _LEVELS.index("INFO"):
        sentences.append(
            f"{LEVEL}={user_values[LEVEL]} prints no lines of operations; unset it so that commprof sets TRACE"
        )
    elif rank < _LEVELS.index("TRACE"):
        sentences.append(
            f"{LEVEL}={user_values[LEVEL]} loses {_LOST_WITHOUT['CALL']}, which are of level TRACE"
        )
    missing = set(WANTED_SUBSYSTEMS) - subsystems(user_values.get(SUBSYSTEMS, "ALL"))
    if missing:
        lost = [f"{_LOST_WITHOUT[name]} ({name})" for name in WANTED_SUBSYSTEMS if name in missing]
        sentences.append(f"{SUBSYSTEMS}={user_values[SUBSYSTEMS]} loses {', '.join(lost)}")
    if FILE in user_values:
        sentences += _file_losses(user_values[FILE])
    return sentences


def _file_losses(pattern: str) -> list[str]:
    if pattern.startswith("/dev/"):
        return [
            f"{FILE}={pattern} is not a file, so the log is not kept; unset it to store the log in the run"
        ]
    if "%p" not in pattern.replace("%%", ""):
        return [
            f"{FILE}={pattern} has no %p, so the processes of a host write over each other: lines are lost or interleaved"
        ]
    return []


def _listed(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())
