"""Wraps a framework's functions when their modules are imported, to tag the collectives that they issue."""

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
    """One function and its wrapper.

    Attributes:
        module: full name of the module that defines it.
        path: ``function`` or ``Class.method`` within it.
        optional: some versions of its framework lack it, which is no gap.
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
    """A function whose collectives have one purpose, unless its caller has set another."""
    tag = hooks.tag(why.value)
    return Part(module, path, lambda original: tagged_by_default(original, tag), optional)


class Adapter:
    """Installs parts when their modules are imported, and removes them.

    Args:
        journal: gets faults and notes on functions that are missing.
        parts: several wrappers of one function nest in their order, the last outermost.
    """

    def __init__(self, journal: Journal, parts: Iterable[Part]) -> None:
        self._journal = journal
        self._patches = Patches()
        self._parts_by_module: dict[str, list[Part]] = {}
        for part in parts:
            self._parts_by_module.setdefault(part.module, []).append(part)
        self._watch = ImportWatch(self._parts_by_module, self._on_import, journal.fault)

    def install(self) -> None:
        """Wrap the modules that are imported already, and the others when they are imported."""
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
    """The framework that ``module`` is of, and its version."""
    name = module.__name__.partition(".")[0]
    return f"{name} {getattr(sys.modules.get(name), '__version__', 'of an unknown version')}"


def _outside_traces(wrap: Wrap) -> Wrap:
    """Return ``wrap``, modified so that torch.compile traces the original function."""

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
