"""Chooses the NCCL_DEBUG variables that make NCCL write a log which can be aligned; respects the user's values. Pure.

NCCL defines the variables (``src/debug.cc``). Lines of operations have subsystem COLL and level INFO, CALL lines level
TRACE. Only INIT lines name ranks. Each process truncates its file when it opens it, so two processes with one file name
overwrite each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

LEVEL: Final = "NCCL_DEBUG"
SUBSYSTEMS: Final = "NCCL_DEBUG_SUBSYS"
FILE: Final = "NCCL_DEBUG_FILE"
DIRECTORY: Final = "nccl"  # in the run
WANTED_SUBSYSTEMS: Final = ("INIT", "COLL", "CALL", "TUNING")
_VARIABLES: Final = (LEVEL, SUBSYSTEMS, FILE)
_LEVELS: Final = (
    "NONE",
    "VERSION",
    "WARN",
    "INFO",
    "ABORT",
    "TRACE",
)  # each level includes those before it
_LOST_WITHOUT: Final = {
    "INIT": "which rank a communicator's address stands for",
    "COLL": "the lines of operations",
    "CALL": "the lines of API calls",
    "TUNING": "algorithm and protocol",
}


class Mode(StrEnum):
    """What ``--nccl-log`` says."""

    AUTO = "auto"  # where a GPU is visible
    ON = "on"
    OFF = "off"


class Request(NamedTuple):
    """The variables that commprof sets for the ranks, those that the user has set, and what the log lacks due to these."""

    mode: Mode
    set: dict[str, str]
    left: dict[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def own_file(self) -> str | None:
        """The user's own NCCL_DEBUG_FILE, whose files are copied into the run."""
        return None if self.mode is Mode.OFF else self.left.get(FILE)

    def described(self) -> dict[str, Any]:
        """For the manifest."""
        return {"mode": str(self.mode), "set": self.set, "left": self.left, "warnings": list(self.warnings)}

    def sentences(self, shown_run: str) -> list[str]:
        """Return one line with the variables that are set and those left unchanged, and one line per loss.

        Args:
            shown_run: the run directory as messages show it.
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

    A variable that is set, in the environment or in the user's NCCL configuration file, is not changed. An empty one
    counts as not set.

    Args:
        environment: environment of the ranks without these variables; see :func:`with_user_file`.
        gpus: whether the ranks see a GPU. Without one there is no NCCL, and ``auto`` sets nothing.
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
    """Add the NAME=VALUE lines of the user's NCCL configuration file that ``environment`` does not set."""
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {**{name: value for name, equals, value in pairs if equals}, **environment}


def user_file(environment: Mapping[str, str]) -> str:
    """Read the user's NCCL configuration file (NCCL_CONF_FILE, else ``~/.nccl.conf``); empty if there is none."""
    home = environment.get("HOME")
    named = environment.get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home else "")
    try:
        return Path(named).read_text(errors="replace") if named else ""
    except OSError:
        return ""


def subsystems(text: str) -> frozenset[str]:
    """Return the ``WANTED_SUBSYSTEMS`` that a value of NCCL_DEBUG_SUBSYS enables: a list, ALL, or ``^`` and exceptions."""
    inverted = text.startswith("^")
    named = {word.strip().upper() for word in text.removeprefix("^").split(",")}
    on = frozenset(name for name in WANTED_SUBSYSTEMS if name in named or "ALL" in named)
    return frozenset(WANTED_SUBSYSTEMS) - on if inverted else on


def _losses(user_values: Mapping[str, str]) -> list[str]:
    """Return what the log lacks due to the user's own values, a sentence for each variable."""
    level = user_values.get(LEVEL, "TRACE").upper()
    rank = _LEVELS.index(level) if level in _LEVELS else 0
    sentences = []
    if rank < _LEVELS.index("INFO"):
        sentences.append(
            f"{LEVEL}={user_values[LEVEL]} prints no line of an operation; unset it to have TRACE, which commprof requests"
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
        return [f"{FILE}={pattern} is no file, so the log is not kept; unset it to have it in the run"]
    if "%p" not in pattern.replace("%%", ""):
        return [
            f"{FILE}={pattern} has no %p, so the processes of a host write over each other: lines are lost or interleaved"
        ]
    return []


def _listed(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())
