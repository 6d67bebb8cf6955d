"""A framework's functions, wrapped when their modules come: those that say why what they issue is issued."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from commprof import hooks
from commprof.recorder.adapters.imports import ImportWatch
from commprof.recorder.adapters.patching import Patches, tagged, tagged_by_default
from commprof.recorder.process.journal import Journal
from commprof.schema import Purpose

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Part(NamedTuple):
    """One function, and what is put in its place.

    Attributes:
        module: full name of the module that has it.
        path: ``function`` or ``Class.method`` within it.
        optional: some versions of its framework do without it, and nothing is lost there.
    """

    module: str
    path: str
    wrap: Wrap
    optional: bool = False


def purpose(module: str, path: str, why: Purpose, optional: bool = False) -> Part:
    """A function whose collectives have one purpose."""
    tag = hooks.tag(why.value)
    return Part(module, path, lambda original: tagged(original, tag), optional)


def default_purpose(module: str, path: str, why: Purpose, optional: bool = False) -> Part:
    """A function whose collectives have one purpose, unless who calls it has said another."""
    tag = hooks.tag(why.value)
    return Part(module, path, lambda original: tagged_by_default(original, tag), optional)


class Adapter:
    """Puts parts in place as their modules are imported, and takes them out again.

    Args:
        journal: hears of what is not where it is known to be, and of faults.
        parts: several of one function go around one another in their order, the last outermost.
    """

    def __init__(self, journal: Journal, parts: Iterable[Part]) -> None:
        self._journal = journal
        self._patches = Patches()
        self._parts_by_module: dict[str, list[Part]] = {}
        for part in parts:
            self._parts_by_module.setdefault(part.module, []).append(part)
        self._watch = ImportWatch(self._parts_by_module, self._on_import, journal.fault)

    def install(self) -> None:
        """Wrap what is imported already, and the rest when it comes."""
        self._watch.start()

    def remove(self) -> None:
        """Take every wrapper out."""
        self._watch.stop()
        self._patches.remove()

    def _on_import(self, module: ModuleType) -> None:
        missing = [
            part.path
            for part in self._parts_by_module[module.__name__]
            if not self._patches.wrap(module, part.path, _outside_traces(part.wrap)) and not part.optional
        ]
        if missing:
            self._journal.note(
                f"{_version(module)}: {module.__name__} has no {', '.join(missing)}, so what is issued there may "
                "stay without purpose, module and bucket"
            )


def _version(module: ModuleType) -> str:
    """The framework that ``module`` is of, and its version."""
    name = module.__name__.partition(".")[0]
    return f"{name} {getattr(sys.modules.get(name), '__version__', 'of an unknown version')}"


def _outside_traces(wrap: Wrap) -> Wrap:
    """``wrap``, but while torch.compile traces, the original alone is to be seen."""

    def wrap_both(original: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = wrap(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return wrapped(*args, **kwargs)

        return call

    return wrap_both


class Doubts:
    """Hears of what could not be found out about a framework's collectives, and says the first of it in the trace."""

    def __init__(self, journal: Journal, framework: str) -> None:
        self._journal = journal
        self._framework = framework
        self._is_reported = False

    def __call__(self, error: Exception) -> None:
        """Something could not be found out."""
        if not self._is_reported:
            self._is_reported = True
            self._journal.note(
                f"{self._framework}: some of its collectives stay without module, bucket or parameters "
                f"({type(error).__name__}: {error})"
            )
