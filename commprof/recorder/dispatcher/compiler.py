"""Keeps torch.compile from compiling commprof's functions that run between those of a program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

_PACKAGE: Final = __name__.partition(".")[0]


def keep_from_compiler(eval_frame: ModuleType) -> None:
    """Have ``torch._dynamo.eval_frame`` look past our functions: it would compile each as it comes, and find nothing in it.

    What a compiled function calls itself is compiled with it all the same.
    """
    skip: Callable[[CodeType], None] | None = getattr(eval_frame, "skip_code", None)
    if skip is not None:
        for code in _own_codes():
            skip(code)


def _own_codes() -> Iterator[CodeType]:
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if name == _PACKAGE or name.startswith(f"{_PACKAGE}."):
            for value in list(vars(module).values()):
                if getattr(value, "__module__", None) == name:
                    yield from _codes_in(value, seen)


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
