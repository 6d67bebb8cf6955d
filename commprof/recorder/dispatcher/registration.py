"""Registers Python kernels in front of torch's operators, calls torch's own kernels, and unregisters them.

They use the dispatch key BackendSelect: it is active in every thread, in inference mode, under autograd and in compiled
code, and no operator of c10d has a kernel there. torch's own kernels run next, on any device. The operator need not be
defined yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.library import Library

_KEY: Final = "BackendSelect"

_GO_ON: Final = "redispatch_boxed"

# Calls torch's own kernel: with the dispatcher's key set, then the operator's arguments.
Redispatch = Callable[..., Any]


class Kernels:
    """The kernels of one recording."""

    def __init__(self) -> None:
        self.operators: set[str] = set()  # those that have one
        self._libraries: dict[str, Library] = {}

    def put(self, operator: str, make: Callable[[Redispatch], Callable[..., Any]]) -> None:
        """Put the kernel that ``make`` returns in front of ``operator`` (``c10d::allreduce_``), unless one is there.

        The kernel is called with the dispatcher's key set before the arguments, which must go on as they are.

        Raises:
            Exception: this torch takes no such kernel, or has no way on from it.
        """
        if operator in self.operators:
            return
        if not hasattr(torch._C._DispatchOperatorHandle, _GO_ON):
            raise AttributeError(f"torch's operators have no {_GO_ON}")
        namespace, _, name = operator.partition("::")
        kernel = make(bind_redispatch(operator))
        if namespace not in self._libraries:
            self._libraries[namespace] = Library(namespace, "IMPL")
        self._libraries[namespace].impl(name, kernel, _KEY, with_keyset=True)
        self.operators.add(operator)

    def remove(self) -> None:
        """Unregister every kernel. Must run before the interpreter ends: torch would call into it."""
        libraries = list(self._libraries.values())
        self._libraries.clear()
        self.operators.clear()
        for library in libraries:
            library._destroy()


def bind_redispatch(operator: str) -> Redispatch:
    """What goes on from our kernel of ``operator`` to torch's own."""
    after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
    go_on: Any = None

    def redispatch(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal go_on
        if go_on is None:
            go_on = getattr(torch._C._dispatch_find_schema_or_throw(operator, ""), _GO_ON)
        return go_on(keyset & after, *args, **kwargs)

    return redispatch


def operator_names(namespace: str) -> list[str]:
    """The operators of ``namespace`` that this process knows now, without overloads."""
    names: list[str] = getattr(torch._C, "_dispatch_get_all_op_names", list)()
    return sorted({name for name in names if name.startswith(f"{namespace}::") and "." not in name})


def is_operator(name: str) -> bool:
    """Whether this process knows an operator of that name now."""
    return bool(torch._C._dispatch_has_kernel(name))


def arguments_of(operator: str) -> list[tuple[str, str]]:
    """The arguments of ``operator`` as its schema names them: name and type.

    Raises:
        RuntimeError: there is no such operator.
    """
    schema = torch._C._dispatch_find_schema_or_throw(operator, "").schema()  # type: ignore[attr-defined]
    return [(argument.name, str(argument.type)) for argument in schema.arguments]
