"""Lets a rank that tests start train without importing torch._dynamo, which takes 2 to 3 seconds of CPU time.

torch imports torch._dynamo in the first step of any optimizer, to exclude the step from compilation. With this
module, ``import torch._dynamo`` returns a module that contains only the two functions that this needs. Any
other attribute, or a submodule, loads the real package.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAME = "torch._dynamo"


class _Dynamo(ModuleType):
    """A substitute for ``torch._dynamo`` in a program that compiles nothing."""

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Do nothing, because nothing is compiled."""

    @staticmethod
    def disable(fn=None, recursive=True, **options):
        """Return the function unchanged, because nothing is compiled."""
        return fn if fn is not None else lambda function: function

    def __getattr__(self, name: str):
        # The import system and inspect read such names of every module. The import of a submodule reads __path__.
        if name.startswith("__") and (name != "__path__" or "complete" not in self.__dict__):
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Finder]
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


class _Finder:
    """A finder that provides the substitute for ``torch._dynamo``."""

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        """Return the spec of the substitute for ``torch._dynamo``; None for other modules."""
        return ModuleSpec(name, _Finder) if name == _NAME else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """Return the substitute for ``torch._dynamo``."""
        return _Dynamo(spec.name, __doc__)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Mark the substitute as complete, so that an import of a submodule loads the real package."""
        module.complete = True


sys.meta_path.insert(0, _Finder)
