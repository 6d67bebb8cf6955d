"""Which DeepSpeed a program gets: the installed one, or the names that zero_runtime gives (``commprof run --engine``).

The environment carries the choice to every process below the command; each decides where it first asks for ``deepspeed``.
Standard library only, and nothing of either DeepSpeed is imported before that.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "COMMPROF_ENGINE"
PATHS_VARIABLE: Final = "COMMPROF_ENGINE_PATHS"
PACKAGE: Final = "deepspeed"
RUNTIME: Final = "zero_runtime"  # by name only: the profiler imports no runtime
PYTHON_VARIABLE: Final = "COMMPROF_ENGINE_PYTHON"
COMMANDS: Final = (
    Path(__file__).parent / "launch" / "inject" / "commands"
)  # the launcher `deepspeed`, of zero_runtime
_OURS: Final = (RUNTIME, "commprof")


class Engine(StrEnum):
    """What ``import deepspeed`` means in a program."""

    AUTO = "auto"
    ZERO_RUNTIME = "zero_runtime"
    DEEPSPEED = "deepspeed"


def variables(engine: Engine | None, path: str = "") -> dict[str, str]:
    """What tells the processes of a program of the choice.

    Args:
        path: their PATH. Where zero_runtime may be chosen, its launcher ``deepspeed`` stands behind all that is there, for
            shell scripts and launchers that start one.
    """
    if engine is None:
        return {}
    parents = []
    for name in _OURS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            parents.append(str(Path(spec.origin).parent.parent))
    choice = {VARIABLE: engine.value, PATHS_VARIABLE: os.pathsep.join(dict.fromkeys(parents))}
    if engine is Engine.DEEPSPEED:
        return choice
    entries = [entry for entry in path.split(os.pathsep) if entry and entry != str(COMMANDS)]
    return {
        **choice,
        PYTHON_VARIABLE: sys.executable,
        "PATH": os.pathsep.join([*(entries or os.defpath.split(os.pathsep)), str(COMMANDS)]),
    }


def is_installed(directory: str) -> bool:
    """Whether a script in ``directory`` would find DeepSpeed itself, run by this Python."""
    return PathFinder.find_spec(PACKAGE, [directory, *sys.path]) is not None


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Act on the choice that the environment carries, in this process. Does nothing without one, or a second time."""
    chosen = environment.get(VARIABLE, "")
    if chosen not in list(Engine) or any(isinstance(finder, EngineFinder) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        return
    paths = [path for path in environment.get(PATHS_VARIABLE, "").split(os.pathsep) if path]
    sys.meta_path.insert(0, EngineFinder(Engine(chosen), environment))
    sys.meta_path.append(_Beside(paths))


class EngineFinder:
    """Decides what ``deepspeed`` is when it is first asked for, and leaves.

    Args:
        engine: the choice.
        environment: says whether this process is the one that speaks.
    """

    def __init__(self, engine: Engine, environment: Mapping[str, str]) -> None:
        self._engine = engine
        self._speaks = environment.get("RANK", "0") == "0"
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """The spec of ``deepspeed``; None for all other names.

        Raises:
            ModuleNotFoundError: the installed one is wanted, and there is none.
        """
        if name != PACKAGE or self._asking:
            return None
        installed = None
        if self._engine is not Engine.ZERO_RUNTIME:
            self._asking = True
            try:
                installed = _elsewhere(self, name, path, target)
            finally:
                self._asking = False
        if installed is None and self._engine is Engine.DEEPSPEED:
            raise ModuleNotFoundError(missing(sys.executable), name=PACKAGE)
        self._leave()
        if installed is not None:
            self._say(f"the DeepSpeed that is installed, in {installed.origin}")
            return installed
        self._say("zero_runtime, since no DeepSpeed is installed")
        importlib.import_module(f"{RUNTIME}.deepspeed_names").as_deepspeed()
        spec: ModuleSpec | None = sys.meta_path[0].find_spec(name, path, target)
        return spec

    def find_distributions(self, context: Any) -> Iterable[Any]:
        """What importlib.metadata knows of ``deepspeed`` before anyone has imported it."""
        if (context.name or "").lower() != PACKAGE or self._asking:
            return []
        if self._engine is Engine.DEEPSPEED or self.find_spec(PACKAGE) is None:
            return []
        # As the decision was: nothing more where DeepSpeed itself is found on the path.
        find = getattr(sys.meta_path[0], "find_distributions", None)
        ours = type(sys.meta_path[0]).__module__.startswith(f"{RUNTIME}.")
        distributions: Iterable[Any] = find(context) if ours and find is not None else []
        return distributions

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _say(self, what: str) -> None:
        if self._engine is Engine.AUTO and self._speaks:
            sys.stderr.write(f"commprof: --engine auto: import deepspeed gives {what}\n")


class _Beside:
    """Finds zero_runtime and commprof where the command found them, in a Python that has neither."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """The spec of these two packages."""
        return PathFinder.find_spec(name, self._paths) if name in _OURS else None


def missing(python: str) -> str:
    """That there is no DeepSpeed, and what to do."""
    return (
        f"--engine deepspeed was asked for, and {python} has no DeepSpeed installed; install it, or use "
        "--engine zero_runtime, which gives its names"
    )


def _elsewhere(asking: Any, name: str, path: Any, target: Any) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = None if finder is asking else getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, path, target) if find is not None else None
        if spec is not None:
            return spec
    return None
