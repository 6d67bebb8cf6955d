"""Keeps torch.compile from compiling commprof's functions that run between those of a program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

_PACKAGE: Final = __name__.partition(".")[0]
# The recorder imports these packages and modules directly below commprof, nothing else of ours. A program may have imported
# all of commprof to ask about its run: six times as many functions.
_RECORDING: Final = frozenset({"recorder", "trace"})
# The names of the modules that were passed to each skip_code. A fork inherits what torch has stored about their code.
_kept: Final[dict[Callable[[CodeType], None], set[str]]] = {}


def keep_from_compiler(eval_frame: ModuleType) -> None:
    """Have ``torch._dynamo.eval_frame`` look past our functions: it would compile each as it comes, and find nothing in it.

    What a compiled function calls itself is compiled with it all the same.
    """
    skip: Callable[[CodeType], None] | None = getattr(eval_frame, "skip_code", None)
    if skip is not None:
        for code in _own_codes(_kept.setdefault(skip, set())):
            skip(code)


def _own_codes(done: set[str]) -> Iterator[CodeType]:
    """The code of all modules that are not in ``done``, where they are added."""
    seen: set[int] = set()
    for module in _modules(sys.modules[_PACKAGE]):
        name = module.__name__
        if name not in done:
            done.add(name)
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) == name:
                    yield from _codes_in(value, seen)


def _modules(module: ModuleType) -> Iterator[ModuleType]:
    """``module`` and its imported submodules, of commprof only those that record. ``sys.modules`` is not searched: it may
    hold thousands of modules, and a forked process copies the memory page of each that it looks at.
    """
    yield module
    if hasattr(module, "__path__"):
        for name, value in list(vars(module).items()):
            is_own = isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}"
            is_other = module.__name__ == _PACKAGE and hasattr(value, "__path__") and name not in _RECORDING
            if is_own and not is_other:
                yield from _modules(value)


def _codes_in(value: Any, seen: set[int]) -> Iterator[CodeType]:
    """The code of a function, or of all methods of a class. ``seen``: classes that are done; one may hold itself."""
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
