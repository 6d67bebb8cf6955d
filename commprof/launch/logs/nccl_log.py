"""What to ask NCCL to print, for a log that can be tied to the records; what of it the user has chosen already. Pure.

The meaning of the variables is NCCL's (``src/debug.cc``): lines of operations are of subsystem COLL and level INFO, CALL
lines of level TRACE; ranks stand only in lines of INIT; each process opens its file anew, so that two processes with one
name write over each other.
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
)  # each prints what stands before it as well
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
    """The variables that commprof sets for the ranks, those that it found set, and what is lost by these."""

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
        """What a person is told: in one line what was set and what was left, and a line for each thing lost.

        Args:
            shown_run: the run directory as it is shown to people.
        """
        if not self.set and not self.warnings:
            return []
        shown = {**self.set, FILE: f"{shown_run}/{DIRECTORY}/{_FILE_NAME}"} if FILE in self.set else self.set
        parts = [f"set {_listed(shown)}"] if self.set else []
        if self.left:
            parts.append(f"left as you set it: {_listed(self.left)}")
        off = " (--nccl-log off sets nothing)" if self.set else ""
        return [f"NCCL log: {'; '.join(parts)}{off}", *(f"warning: {text}" for text in self.warnings)]


_FILE_NAME: Final = "%h.%p.log"


def request(environment: Mapping[str, str], run: Path, mode: Mode, *, gpus: bool) -> Request:
    """What to set for the ranks of ``run``.

    A variable that is set, be it in the environment or in the user's NCCL configuration file, is left alone; an empty one
    counts as not set.

    Args:
        environment: of the ranks, without what this sets; see :func:`with_user_file`.
        gpus: whether the ranks see a GPU. Without one there is no NCCL, and ``auto`` sets nothing.
    """
    found = {name: environment[name] for name in _VARIABLES if environment.get(name)}
    if mode is Mode.OFF or (mode is Mode.AUTO and not gpus):
        return Request(mode, {}, found)
    wanted = {
        LEVEL: "TRACE",
        SUBSYSTEMS: ",".join(WANTED_SUBSYSTEMS),
        FILE: f"{str(run.absolute()).replace('%', '%%')}/{DIRECTORY}/{_FILE_NAME}",
    }
    return Request(
        mode,
        {name: value for name, value in wanted.items() if name not in found},
        found,
        tuple(_losses(found)),
    )


def with_user_file(environment: Mapping[str, str], text: str) -> dict[str, str]:
    """``environment`` and, where it says nothing, the NAME=VALUE lines of the user's NCCL configuration file."""
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {**{name: value for name, equals, value in pairs if equals}, **environment}


def user_file(environment: Mapping[str, str]) -> str:
    """The text of the user's NCCL configuration file (NCCL_CONF_FILE, else ``~/.nccl.conf``); empty where there is none."""
    home = environment.get("HOME")
    named = environment.get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home else "")
    try:
        return Path(named).read_text(errors="replace") if named else ""
    except OSError:
        return ""


def subsystems(text: str) -> frozenset[str]:
    """Which of ``WANTED_SUBSYSTEMS`` a value of NCCL_DEBUG_SUBSYS turns on: a list, ALL, or after ``^`` all but a list."""
    inverted = text.startswith("^")
    named = {word.strip().upper() for word in text.removeprefix("^").split(",")}
    on = frozenset(name for name in WANTED_SUBSYSTEMS if name in named or "ALL" in named)
    return frozenset(WANTED_SUBSYSTEMS) - on if inverted else on


def _losses(found: Mapping[str, str]) -> list[str]:
    """What the user's own values lose, a sentence for each variable."""
    level = found.get(LEVEL, "TRACE").upper()
    rank = _LEVELS.index(level) if level in _LEVELS else 0
    sentences = []
    if rank < _LEVELS.index("INFO"):
        sentences.append(
            f"{LEVEL}={found[LEVEL]} prints no line of an operation; unset it to have TRACE, which commprof asks for"
        )
    elif rank < _LEVELS.index("TRACE"):
        sentences.append(f"{LEVEL}={found[LEVEL]} loses {_LOST_WITHOUT['CALL']}, which are of level TRACE")
    missing = set(WANTED_SUBSYSTEMS) - subsystems(found.get(SUBSYSTEMS, "ALL"))
    if missing:
        lost = [f"{_LOST_WITHOUT[name]} ({name})" for name in WANTED_SUBSYSTEMS if name in missing]
        sentences.append(f"{SUBSYSTEMS}={found[SUBSYSTEMS]} loses {', '.join(lost)}")
    if FILE in found:
        sentences += _file_losses(found[FILE])
    return sentences


def _file_losses(pattern: str) -> list[str]:
    if pattern.startswith("/dev/"):
        return [f"{FILE}={pattern} is no file, so the log is not kept; unset it to have it in the run"]
    if "%p" not in pattern.replace("%%", ""):
        return [
            f"{FILE}={pattern} has no %p, so the processes of a host write over each other: lines are lost and torn"
        ]
    return []


def _listed(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())
