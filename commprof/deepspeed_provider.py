"""Chooses what ``import deepspeed`` imports: the installed DeepSpeed or zero_runtime (``commprof run --engine``).

The environment carries the choice to every process of the command. Each process applies the choice at its first import
of ``deepspeed``. Neither implementation is imported earlier. Standard library only.
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
# The directory that contains zero_runtime's launcher `deepspeed`.
COMMANDS: Final = Path(__file__).parent / "launch" / "inject" / "commands"
_OURS: Final = (RUNTIME, "commprof")


class Engine(StrEnum):
    """The implementation that ``import deepspeed`` imports in a program."""

    AUTO = "auto"
    ZERO_RUNTIME = "zero_runtime"
    DEEPSPEED = "deepspeed"


def variables(engine: Engine | None, path: str = "") -> dict[str, str]:
    """Return the environment variables that carry the choice to the processes of a program.

    Args:
        engine: The choice; None if the command makes no choice, in which case there are no variables.
        path: The PATH of the processes. If zero_runtime may be chosen, the directory of its launcher ``deepspeed`` is
            appended, so that shell scripts and other launchers can start this launcher.
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
    """Return whether a script in ``directory``, run by this Python, would find the installed DeepSpeed."""
    return PathFinder.find_spec(PACKAGE, [directory, *sys.path]) is not None


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Apply the choice in the environment to this process.

    Does nothing if the environment contains no choice, or if the choice is already applied.
    """
    chosen = environment.get(VARIABLE, "")
    if chosen not in list(Engine) or any(isinstance(finder, EngineFinder) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        return
    paths = [path for path in environment.get(PATHS_VARIABLE, "").split(os.pathsep) if path]
    sys.meta_path.insert(0, EngineFinder(Engine(chosen), environment))
    sys.meta_path.append(_Beside(paths))


class EngineFinder:
    """A meta path finder that resolves ``deepspeed`` at its first import, and then removes itself.

    Args:
        engine: The choice.
        environment: The environment variables. They show whether this process is rank 0, which prints the decision.
    """

    def __init__(self, engine: Engine, environment: Mapping[str, str]) -> None:
        self._engine = engine
        self._speaks = environment.get("RANK", "0") == "0"
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of ``deepspeed``; None for all other names.

        Raises:
            ModuleNotFoundError: The installed DeepSpeed is requested, but no DeepSpeed is installed.
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
            self._say(f"the installed DeepSpeed, in {installed.origin}")
            return installed
        self._say("zero_runtime, because no DeepSpeed is installed")
        importlib.import_module(f"{RUNTIME}.deepspeed_names").as_deepspeed()
        spec: ModuleSpec | None = sys.meta_path[0].find_spec(name, path, target)
        return spec

    def find_distributions(self, context: Any) -> Iterable[Any]:
        """Return the distributions of ``deepspeed`` for importlib.metadata before ``deepspeed`` is imported."""
        if (context.name or "").lower() != PACKAGE or self._asking:
            return []
        if self._engine is Engine.DEEPSPEED or self.find_spec(PACKAGE) is None:
            return []
        # The result must be consistent with the decision: Python's own finder returns an installed DeepSpeed.
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
    """Finds zero_runtime and commprof in the paths of the command, for a Python in which neither is installed."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of one of these two packages; None for all other names."""
        return PathFinder.find_spec(name, self._paths) if name in _OURS else None


def missing(python: str) -> str:
    """Return the message that ``python`` has no DeepSpeed installed, with the remedy."""
    return (
        f"--engine deepspeed needs DeepSpeed, and {python} has none installed; install it, or use "
        "--engine zero_runtime, which provides its API"
    )


def _elsewhere(asking: Any, name: str, path: Any, target: Any) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = None if finder is asking else getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, path, target) if find is not None else None
        if spec is not None:
            return spec
    return None
