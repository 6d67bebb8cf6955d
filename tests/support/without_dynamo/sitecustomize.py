"""Lets a rank that tests start train without importing torch._dynamo, which takes 2 to 3 seconds of CPU time.

torch imports it in the first step of any optimizer, to say that the step is not to be compiled. Here ``import
torch._dynamo`` gives a module that has these two functions; any other attribute, or a submodule, loads the real package.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAME = "torch._dynamo"


class _Dynamo(ModuleType):
    """``torch._dynamo`` as an uncompiled program uses it."""

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Nothing is compiled."""

    @staticmethod
    def disable(fn=None, recursive=True, **options):
        """Nothing is compiled: the function itself."""
        return fn if fn is not None else lambda function: function

    def __getattr__(self, name: str):
        # The import system and inspect ask every module for such names; __path__ is asked for to find a submodule.
        if name.startswith("__") and (name != "__path__" or "complete" not in self.__dict__):
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Finder]
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


class _Finder:
    """Finds ``torch._dynamo`` here."""

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        """The spec of the module above."""
        return ModuleSpec(name, _Finder) if name == _NAME else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """The module above."""
        return _Dynamo(spec.name, __doc__)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """From now on submodules are found."""
        module.complete = True


sys.meta_path.insert(0, _Finder)
