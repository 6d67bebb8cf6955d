"""Keeps torch.compile from compiling commprof's functions that run between the functions of a program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

_PACKAGE: Final = __name__.partition(".")[0]
# The recorder imports only these packages of commprof, and modules directly below commprof. A program may have imported
# all of commprof to analyze its run, which is six times as many functions.
_RECORDING: Final = frozenset({"recorder", "trace"})
# The names of the modules that were passed to each skip_code. A forked process inherits the data that torch has stored
# about the code of these modules.
_kept: Final[dict[Callable[[CodeType], None], set[str]]] = {}


def keep_from_compiler(eval_frame: ModuleType) -> None:
    """Make ``torch._dynamo.eval_frame`` skip our functions.

    Otherwise torch.compile would compile each of our functions when it is called, and find nothing to compile in it. A
    function that a compiled function calls is still compiled together with this function.
    """
    skip: Callable[[CodeType], None] | None = getattr(eval_frame, "skip_code", None)
    if skip is not None:
        for code in _own_codes(_kept.setdefault(skip, set())):
            skip(code)


def _own_codes(done: set[str]) -> Iterator[CodeType]:
    """Yield the code objects of all modules that are not in ``done``, and add these modules to ``done``."""
    seen: set[int] = set()
    for module in _modules(sys.modules[_PACKAGE]):
        name = module.__name__
        if name not in done:
            done.add(name)
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) == name:
                    yield from _codes_in(value, seen)


def _modules(module: ModuleType) -> Iterator[ModuleType]:
    """Yield ``module`` and its imported submodules; of the packages of commprof, only those that record.

    ``sys.modules`` is not searched, because it may contain thousands of modules. A forked process would copy the memory
    page of each module that it accesses.
    """
    yield module
    if hasattr(module, "__path__"):
        for name, value in list(vars(module).items()):
            is_own = isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}"
            is_other = module.__name__ == _PACKAGE and hasattr(value, "__path__") and name not in _RECORDING
            if is_own and not is_other:
                yield from _modules(value)


def _codes_in(value: Any, seen: set[int]) -> Iterator[CodeType]:
    """Yield the code objects of a function, or of all methods of a class.

    ``seen`` contains the ids of classes that are done, because a class may contain a reference to itself.
    """
    if isinstance(value, FunctionType):
        yield from _with_inner(value.__code__)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _codes_in(value.__func__, seen)
    elif isinstance(value, property):
        yield from _codes_in(value.fget, seen)
    elif isinstance(value, type) and id(value) not in seen:
        seen.add(id(value))
        for member in list(vars(value).values()):
            yield from _codes_in(member, seen)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
