"""Separates the options of commprof from the program and its arguments.

The options of commprof come first. The first word that is not such an option (a script, ``-m`` or ``--``) begins the
program. All words from there on belong to the program and are passed on unchanged.
"""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from commprof.deepspeed_provider import PACKAGE as DEEPSPEED
from commprof.deepspeed_provider import RUNTIME, Engine, is_installed, missing
from commprof.errors import UsageError

CONFIG_ARGUMENTS = ("--config", "--deepspeed_config", "--deepspeed-config", "--ds_config", "--ds-config")

# Launchers start the ranks themselves, so they must be started only once. A script or module starts on every rank.
_LAUNCHER_COMMANDS: Final = ("torchrun", "accelerate", DEEPSPEED)
_LAUNCHER_MODULES: Final = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    f"{DEEPSPEED}.launcher.runner",
    f"{RUNTIME}.launch",
)


class Kind(StrEnum):
    """How a program is started."""

    SCRIPT = "script"  # python SCRIPT ARGS, once per rank
    MODULE = "module"  # python -m MODULE ARGS, once per rank
    COMMAND = "command"  # CMD ARGS, once; the injection reaches the ranks that CMD starts


class Program(NamedTuple):
    """A program and its arguments."""

    kind: Kind
    target: str
    arguments: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The name for the runs of the program: the script without directory and suffix."""
        if self.kind is Kind.MODULE:
            return self.target.removesuffix(".__main__").rpartition(".")[2] or "module"
        if self.kind is Kind.COMMAND:
            return Path(self.script or self.target).stem or "command"
        path = Path(self.target)
        return (path.resolve().name if path.is_dir() else path.stem.strip(".")) or "script"

    @property
    def script(self) -> str | None:
        """The script or module that the ranks run; for a launcher, the first word that looks like a script."""
        if self.kind is not Kind.COMMAND:
            return self.target
        return next((word for word in self.arguments if word.endswith(".py")), None)

    def command_line(self, python: Sequence[str]) -> list[str]:
        """Return the command line to execute. ``python`` (interpreter and flags) precedes a script or module."""
        if self.kind is Kind.COMMAND:
            return [self.target, *self.arguments]
        module = ["-m"] if self.kind is Kind.MODULE else []
        return [*python, *module, self.target, *self.arguments]


def split_arguments(argv: Sequence[str], value_options: Collection[str]) -> tuple[list[str], list[str]]:
    """Split ``argv`` into the options of commprof and the words of the program.

    The program begins at the first word that is not an option, or at ``-m``, ``-mMODULE`` or ``--``. The second part
    includes this word.

    Args:
        argv: The words of the command line after the verb.
        value_options: The options of commprof that take a value (``--nproc``, ``-o``). Any other option counts as a
            flag, so that the parser of the first part still reports misspelled options.

    >>> split_arguments(["--nproc", "2", "train.py", "--nproc", "9"], {"--nproc"})
    (['--nproc', '2'], ['train.py', '--nproc', '9'])
    """
    position = 0
    while position < len(argv):
        word = argv[position]
        if not word.startswith("-") or word in ("-", "--") or word.startswith("-m"):
            break
        takes_next = word in value_options  # --name=value and -oVALUE include the value
        position += 2 if takes_next else 1
    return list(argv[:position]), list(argv[position:])


def parse_program(words: Sequence[str]) -> Program:
    """Parse ``words`` (the second part of :func:`split_arguments`) as a program.

    After ``--``, a word that ends in ``.py`` is still a script and ``-m`` a module; anything else is a command.

    Raises:
        UsageError: there is no program, or the program cannot be started.
    """
    after_dashes = bool(words) and words[0] == "--"
    words = words[1:] if after_dashes else words
    if not words:
        raise UsageError("no program was given. Say what to run: commprof run train.py, -m MODULE, or -- CMD")
    first, rest = words[0], tuple(words[1:])
    if first.startswith("-m"):
        if first != "-m":
            return Program(Kind.MODULE, first[2:], rest)
        if not rest or not rest[0]:
            raise UsageError("-m needs the name of a module: commprof run -m package.module")
        return Program(Kind.MODULE, rest[0], rest[1:])
    if first == "-":
        raise UsageError("a program on standard input cannot be given to several ranks; write it to a file")
    if after_dashes and not first.endswith(".py"):
        return Program(Kind.COMMAND, first, rest)
    return Program(Kind.SCRIPT, first, rest)


def with_engine(program: Program, engine: Engine | None) -> Program:
    """Return ``program`` with the command that ``engine`` requires.

    If the command is ``deepspeed`` and no such command is installed, the launcher of zero_runtime replaces the command.
    This requires the engine ``auto`` or ``zero_runtime``.

    Raises:
        UsageError: ``engine`` is the installed DeepSpeed, and DeepSpeed is not installed.
    """
    if program.kind is Kind.COMMAND:
        ours = engine in (Engine.AUTO, Engine.ZERO_RUNTIME) and program.target == DEEPSPEED
        if ours and shutil.which(DEEPSPEED) is None:
            return Program(Kind.COMMAND, sys.executable, ("-m", f"{RUNTIME}.launch", *program.arguments))
        return program
    directory = Path(program.target).parent if program.kind is Kind.SCRIPT else Path()
    if engine is Engine.DEEPSPEED and not is_installed(str(directory.absolute())):
        raise UsageError(missing(sys.executable))
    return program


def check_program(program: Program) -> None:
    """Raise UsageError if ``program`` cannot be started, before any file is written.

    This function does not check modules or the syntax of scripts, because Python reports these errors itself.
    """
    if program.kind is Kind.COMMAND:
        if shutil.which(program.target) is None:
            instead = (
                " With --engine zero_runtime, ranks start without it" if program.target == DEEPSPEED else ""
            )
            raise UsageError(f"no such command: {program.target}. Is it installed, and on PATH?{instead}")
        return
    if program.kind is Kind.MODULE:
        if program.target in _LAUNCHER_MODULES:
            raise UsageError(_starts_ranks(f"-m {program.target}", f"python -m {program.target}"))
        return
    path = Path(program.target)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise UsageError(f"{program.target} is a directory without __main__.py; name the script to run")
    elif not path.exists():
        if shutil.which(program.target) is not None:
            once = f"commprof run -- {shlex.quote(program.target)} ..."
            if path.name.startswith("python"):
                once = f"commprof run SCRIPT (on every rank), or {once} (once)"
            raise UsageError(f"{program.target} is a command, not a script. Write: {once}")
        raise UsageError(f"no such script: {program.target}.{_suggestion(path)}")
    elif not os.access(path, os.R_OK):
        raise UsageError(f"no permission to read the script {program.target}")
    elif path.name in _LAUNCHER_COMMANDS:
        raise UsageError(_starts_ranks(program.target, shlex.quote(program.target)))
    elif path.suffix == ".sh":
        raise UsageError(
            f"{program.target} is a shell script. Write: commprof run -- bash {shlex.quote(program.target)} ..."
        )


def _starts_ranks(what: str, command: str) -> str:
    return f"{what} starts ranks of its own, so it is started once. Write: commprof run -- {command} ..."


def _suggestion(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix == ".py")
    except OSError:
        return f" There is no directory {path.parent} either." if not path.parent.is_dir() else ""
    close = difflib.get_close_matches(path.name, names, n=1)
    if close:
        return f" Did you mean {path.with_name(close[0])}?"
    return " Put options of commprof before the script, and the script before its own arguments."


class Found(NamedTuple):
    """An argument of a program: its name, the position of the word that contains its value, and the value."""

    name: str
    position: int
    value: str


def find_argument(arguments: Sequence[str], names: Collection[str]) -> Found | None:
    """Return the last argument with one of ``names``, as ``--name value`` or ``--name=value``; None if there is none.

    >>> find_argument(["--config", "ds.json"], ["--config"])
    Found(name='--config', position=1, value='ds.json')
    """
    last_match = None
    for position, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name not in names:
            continue
        if equals:
            last_match = Found(name, position, value)
        elif position + 1 < len(arguments):
            last_match = Found(name, position + 1, arguments[position + 1])
    return last_match


def replace_argument(arguments: Sequence[str], position: int, value: str) -> tuple[str, ...]:
    """Return ``arguments`` with the value at ``position`` replaced. The form ``--name=value`` is kept."""
    word = arguments[position]
    name, equals, _ = word.partition("=")
    joined = bool(equals) and name.startswith("--")
    return (*arguments[:position], f"{name}={value}" if joined else value, *arguments[position + 1 :])
