"""Notifies of modules when they are imported, without importing any."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportWatch:
    """A meta path finder that finds nothing, but notifies when one of ``names`` has been executed.

    The notification comes when the module is complete, though the import of its package may not be: deepspeed's own
    ``__init__`` imports torch, so recording mostly begins in the middle of that.

    Args:
        names: full names of modules.
        on_import: called with each of them that is imported already or later.
        on_fault: called with exceptions of ``on_import``.
    """

    def __init__(
        self,
        names: Iterable[str],
        on_import: Callable[[ModuleType], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._names = frozenset(names)
        self._on_import = on_import
        self._on_fault = on_fault

    def start(self) -> None:
        """Notify of the modules that are imported already, and watch for the others."""
        sys.meta_path.insert(0, self)
        for name in sorted(self._names):
            module = sys.modules.get(name)
            if module is not None and not _is_loading(module):
                self._tell(module)

    def stop(self) -> None:
        """Listen no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the other finders with a loader that notifies; None for all other names."""
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._watch(spec)
                return spec
        return None

    def _watch(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None or not hasattr(loader, "__dict__"):
            return
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            if self in sys.meta_path:
                self._tell(module)

        # Set on the instance, which belongs to this module only: the loader's class stays unchanged.
        loader.exec_module = execute_and_tell  # type: ignore[method-assign]

    def _tell(self, module: ModuleType) -> None:
        try:
            self._on_import(module)
        except Exception as error:
            self._on_fault(error)


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
