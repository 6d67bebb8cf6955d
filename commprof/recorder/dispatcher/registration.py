"""Registers Python kernels in front of torch's operators, calls torch's own kernels, and unregisters them.

The kernels use the dispatch key BackendSelect. This key is active in every thread, in inference mode, under autograd
and in compiled code, and no operator of c10d has a kernel for it. torch's own kernels run next, on any device. The
operator need not be defined yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.library import Library

_KEY: Final = "BackendSelect"

_GO_ON: Final = "redispatch_boxed"

# Calls torch's own kernel. The arguments are the dispatcher's key set, and then the arguments of the operator.
Redispatch = Callable[..., Any]


class Kernels:
    """The kernels of one recording."""

    def __init__(self) -> None:
        self.operators: set[str] = set()  # the operators that have a kernel
        self._libraries: dict[str, Library] = {}

    def put(self, operator: str, make: Callable[[Redispatch], Callable[..., Any]]) -> None:
        """Register a kernel in front of ``operator`` (``c10d::allreduce_``), unless the operator already has one.

        Args:
            operator: The name of the operator, without overload.
            make: A function that returns the kernel. The kernel is called with the dispatcher's key set and then the
                arguments, and must pass the arguments on unchanged.

        Raises:
            Exception: This version of torch accepts no such kernel, or cannot continue from it to its own kernel.
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
        """Unregister every kernel. This must run before the interpreter ends, or torch would still call the kernels."""
        libraries = list(self._libraries.values())
        self._libraries.clear()
        self.operators.clear()
        for library in libraries:
            library._destroy()


def bind_redispatch(operator: str) -> Redispatch:
    """Return a function that continues from our kernel of ``operator`` to torch's own kernel."""
    after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
    go_on: Any = None

    def redispatch(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal go_on
        if go_on is None:
            go_on = getattr(torch._C._dispatch_find_schema_or_throw(operator, ""), _GO_ON)
        return go_on(keyset & after, *args, **kwargs)

    return redispatch


def operator_names(namespace: str) -> list[str]:
    """Return the operators of ``namespace`` that are currently defined in this process, without overloads."""
    names: list[str] = getattr(torch._C, "_dispatch_get_all_op_names", list)()
    return sorted({name for name in names if name.startswith(f"{namespace}::") and "." not in name})


def is_operator(name: str) -> bool:
    """Return whether an operator called ``name`` is currently defined in this process."""
    return bool(torch._C._dispatch_has_kernel(name))


def arguments_of(operator: str) -> list[tuple[str, str]]:
    """Return name and type of each argument of ``operator``, according to its schema.

    Raises:
        RuntimeError: There is no such operator.
    """
    schema = torch._C._dispatch_find_schema_or_throw(operator, "").schema()  # type: ignore[attr-defined]
    return [(argument.name, str(argument.type)) for argument in schema.arguments]
