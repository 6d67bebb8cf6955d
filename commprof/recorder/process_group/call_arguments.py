"""Notes the arguments of torch.distributed's functions for the wrapper of the ProcessGroup method that they call.

Note [the reduction, from torch's own function]: a signature depends on the reduction. Reading the reduction from the
options, with ``asyncOp`` and the hash, takes a wrapper 0.5 us of the 2.5 us that a collective may cost. torch's
function has the same values as arguments. A stand-in therefore replaces torch's function inside torch's logging wrapper
(this also works for names that were imported earlier). The stand-in notes the values, calls torch's function, and
clears the note. This takes 0.1 us.

The note contains the tensor. A wrapper uses the note only in a call with the same tensor object, so calls from other
threads or other places never use a wrong note. The note is used only in the key of the table of known signatures. The
columns of a signature are always read from the options. A reduction is identified by its address. This is safe because
the recorder keeps a reference to each enum value whose address is part of a key.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch._C._distributed_c10d import ReduceOp
from torch.distributed import c10d_logger, distributed_c10d

_REDUCTIONS: Final = type(ReduceOp.SUM)
_MOST_HELD: Final = 64

# The tensor, the reduction, whether a handle is requested, and the other values on which the signature depends.
Asked = tuple[Any, Any, Any, Any]
_NOTHING: Final[Asked] = (None, None, None, None)


class ApiFunction(NamedTuple):
    """A function of torch.distributed, with the data that the wrapper of the called ProcessGroup method needs.

    Attributes:
        name: The name of the function.
        code: The code object of the function.
        stand_in: The function that replaces it.
        takes_none: Whether it accepts None instead of a handle for which it would wait immediately.
    """

    name: str
    code: CodeType
    stand_in: FunctionType
    takes_none: bool


class ApiFunctions:
    """The stand-ins of one recording. ``latest[0]`` contains the noted arguments of the function that is running."""

    def __init__(self) -> None:
        self.latest: list[Asked] = [_NOTHING]
        self._reductions: dict[int, Any] = {}
        self._replaced: list[tuple[Any, FunctionType, FunctionType]] = []

    def install(self, method: str) -> ApiFunction | None:
        """Replace the function of torch.distributed that calls ProcessGroup's ``method`` with a stand-in.

        Returns:
            The function. None if there is no such function, or if it is not as expected: with the arguments of the
            stand-in, and within exactly one logging wrapper.
        """
        name, make = _FUNCTIONS.get(method, ("", _of_all_reduce))
        logged = getattr(distributed_c10d, name, None)
        function = getattr(logged, "__wrapped__", None)
        if (
            not isinstance(logged, FunctionType)
            or not isinstance(function, FunctionType)
            or hasattr(function, "__wrapped__")
            or logged.__code__.co_filename != c10d_logger.__file__
        ):
            return None
        stand_in = make(function, self.latest)
        if _parameters(stand_in) != _parameters(function):
            return None
        stand_in.__defaults__ = function.__defaults__
        cell = next((cell for cell in logged.__closure__ or () if cell.cell_contents is function), None)
        if cell is None:
            return None
        cell.cell_contents = stand_in
        self._replaced.append((cell, function, stand_in))
        return ApiFunction(name, function.__code__, stand_in, _takes_none(method, function))

    def remove(self) -> None:
        """Restore torch's functions."""
        for cell, function, stand_in in self._replaced:
            if cell.cell_contents is stand_in:
                cell.cell_contents = function
        self._replaced.clear()

    def hold(self, reduction: Any) -> bool:
        """Keep a reference to ``reduction``; return whether its address may be part of a key."""
        if reduction is None:
            return True
        if type(reduction) is not _REDUCTIONS or len(self._reductions) > _MOST_HELD:
            return False
        self._reductions[id(reduction)] = reduction
        return True


def _of_all_reduce(function: Any, latest: list[Asked]) -> Any:
    def all_reduce(tensor: Any, op: Any, group: Any, async_op: Any) -> Any:
        latest[0] = tensor, op, async_op, None
        try:
            return function(tensor, op, group, async_op)
        finally:
            latest[0] = _NOTHING

    return all_reduce


def _of_broadcast(function: Any, latest: list[Asked]) -> Any:
    def broadcast(tensor: Any, src: Any, group: Any, async_op: Any, group_src: Any) -> Any:
        latest[0] = tensor, None, async_op, (src, group_src)
        try:
            return function(tensor, src, group, async_op, group_src)
        finally:
            latest[0] = _NOTHING

    return broadcast


def _of_reduce(function: Any, latest: list[Asked]) -> Any:
    def reduce(tensor: Any, dst: Any, op: Any, group: Any, async_op: Any, group_dst: Any) -> Any:
        latest[0] = tensor, op, async_op, (dst, group_dst)
        try:
            return function(tensor, dst, op, group, async_op, group_dst)
        finally:
            latest[0] = _NOTHING

    return reduce


def _of_all_gather(function: Any, latest: list[Asked]) -> Any:
    def all_gather(output_tensor: Any, input_tensor: Any, group: Any, async_op: Any) -> Any:
        latest[0] = input_tensor, None, async_op, None
        try:
            return function(output_tensor, input_tensor, group, async_op)
        finally:
            latest[0] = _NOTHING

    return all_gather


def _of_reduce_scatter(function: Any, latest: list[Asked]) -> Any:
    def reduce_scatter(output: Any, input: Any, op: Any, group: Any, async_op: Any) -> Any:
        latest[0] = input, op, async_op, None
        try:
            return function(output, input, op, group, async_op)
        finally:
            latest[0] = _NOTHING

    return reduce_scatter


# By ProcessGroup method: the function of torch.distributed that calls it, and the function that creates the stand-in.
_FUNCTIONS: Final[dict[str, tuple[str, Callable[[Any, list[Asked]], Any]]]] = {
    "allreduce": ("all_reduce", _of_all_reduce),
    "broadcast": ("broadcast", _of_broadcast),
    "reduce": ("reduce", _of_reduce),
    "_allgather_base": ("all_gather_into_tensor", _of_all_gather),
    "all_gather_single": ("all_gather_single", _of_all_gather),
    "_reduce_scatter_base": ("reduce_scatter_tensor", _of_reduce_scatter),
    "reduce_scatter_single": ("reduce_scatter_single", _of_reduce_scatter),
}


def _parameters(function: FunctionType) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def _takes_none(method: str, function: FunctionType) -> bool:
    """Return whether ``function`` accepts that ``method`` returns no handle.

    This is tested by a call with a group that sends nothing.
    """
    silent = type("SilentGroup", (), {method: lambda self, *args: None})()
    names = _parameters(function)
    tensors = [torch.empty(0, device="cpu")] * (2 if names[1].startswith("input") else 1)
    roots = {name: 0 for name in names if name.startswith("group_")}
    try:
        return function(*tensors, group=silent, **roots) is None
    except Exception:
        return False
