"""Notifies the recorder when modules are imported, without importing any module itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportWatch:
    """A meta path finder that finds no module itself, but notifies when a module in ``names`` has been executed.

    The notification comes when the module is complete. The import of its package may not be complete then. For
    example, deepspeed's own ``__init__`` imports torch, so recording usually begins during the import of
    deepspeed.

    Args:
        names: The full names of the modules.
        on_import: A function that is called with each of the modules that is already imported or is imported later.
        on_fault: A function that is called with each exception that ``on_import`` raises.
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
        """Notify of the modules that are already imported, and start to watch for the other modules."""
        sys.meta_path.insert(0, self)
        for name in sorted(self._names):
            module = sys.modules.get(name)
            if module is not None and not _is_loading(module):
                self._tell(module)

    def stop(self) -> None:
        """Stop watching."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec that the other finders return, with a loader that notifies.

        The result is None if ``name`` is not in the watched names, or if no finder returns a spec.
        """
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

        # The method is set on the loader instance, which belongs to this module only. The class is unchanged.
        loader.exec_module = execute_and_tell  # type: ignore[method-assign]

    def _tell(self, module: ModuleType) -> None:
        try:
            self._on_import(module)
        except Exception as error:
            self._on_fault(error)


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
