"""Wraps functions of a framework when their modules are imported, to tag the collectives that the functions issue."""

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
    """A function to wrap, and its wrapper.

    Attributes:
        module: The full name of the module that defines the function.
        path: The path of the function within the module: ``function`` or ``Class.method``.
        wrap: A function that returns the wrapper of the function that it is called with.
        optional: Whether some versions of the framework lack the function. If so, no note is written when it is
            missing.
    """

    module: str
    path: str
    wrap: Wrap
    optional: bool = False


def purpose(module: str, path: str, why: Purpose, optional: bool = False) -> Part:
    """Return a part that tags all collectives of a function with the purpose ``why``."""
    tag = hooks.tag(why.value)
    return Part(module, path, lambda original: tagged(original, tag), optional)


def default_purpose(module: str, path: str, why: Purpose, optional: bool = False) -> Part:
    """Return a part that tags all collectives of a function with the purpose ``why`` if no tag is already open."""
    tag = hooks.tag(why.value)
    return Part(module, path, lambda original: tagged_by_default(original, tag), optional)


class Adapter:
    """Wraps the functions of parts when their modules are imported, and removes the wrappers.

    Args:
        journal: The journal that receives faults, and notes on missing functions.
        parts: The functions to wrap. Several wrappers of the same function are nested in order, with the last
            one outermost.
    """

    def __init__(self, journal: Journal, parts: Iterable[Part]) -> None:
        self._journal = journal
        self._patches = Patches()
        self._parts_by_module: dict[str, list[Part]] = {}
        for part in parts:
            self._parts_by_module.setdefault(part.module, []).append(part)
        self._watch = ImportWatch(self._parts_by_module, self._on_import, journal.fault)

    def install(self) -> None:
        """Wrap the functions of modules that are already imported, and of other modules when they are imported."""
        self._watch.start()

    def remove(self) -> None:
        """Remove every wrapper."""
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
    """Return the name and version of the framework to which ``module`` belongs."""
    name = module.__name__.partition(".")[0]
    return f"{name} {getattr(sys.modules.get(name), '__version__', 'of an unknown version')}"


def _outside_traces(wrap: Wrap) -> Wrap:
    """Return a version of ``wrap`` whose wrappers call the original function while torch.compile traces it."""

    def wrap_both(original: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = wrap(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return wrapped(*args, **kwargs)

        return call

    return wrap_both


class Doubts:
    """Counts failures to determine details of a framework's collectives, and notes the first one in the trace."""

    def __init__(self, journal: Journal, framework: str) -> None:
        self._journal = journal
        self._framework = framework
        self._is_reported = False

    def __call__(self, error: Exception) -> None:
        """Report a detail that could not be determined."""
        if not self._is_reported:
            self._is_reported = True
            self._journal.note(
                f"{self._framework}: some of its collectives stay without module, bucket or parameters "
                f"({type(error).__name__}: {error})"
            )
