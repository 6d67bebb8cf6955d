"""What of a call's arguments its signature depends on, read as cheaply as torch allows.

Note [the reduction, from torch's own frame]: reading ``options.reduceOp`` costs 0.65 us of the 3 that a collective may
cost, because pybind ties the new object to the options (keep_alive). torch's own functions have the same value in their
argument ``op``, and ``async_op`` beside it, so when the caller is exactly that function its arguments are read instead
(0.4 us for all). They only make the key under which a signature is found again: its columns always come from the options.
``op`` is known by its address, which is sound because each enum value whose address is part of a key is held; with any
other object nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

from torch._C._distributed_c10d import ReduceOp
from torch.distributed import c10d_logger, distributed_c10d

_REDUCTIONS: Final = type(ReduceOp.SUM)
_MOST_HELD: Final = 64

# By ProcessGroup method, for those that torch.distributed calls all the time: what is read of the options.
OPTION_KEYS: Final[dict[str, Callable[[Any], Any]]] = {
    "allreduce": lambda options: (hash(options.reduceOp), options.asyncOp),
    "broadcast": attrgetter("asyncOp", "rootRank"),
    "reduce": lambda options: (hash(options.reduceOp), options.asyncOp, options.rootRank),
    "_allgather_base": attrgetter("asyncOp"),
    "all_gather_single": attrgetter("asyncOp"),
    "_reduce_scatter_base": lambda options: (hash(options.reduceOp), options.asyncOp),
    "reduce_scatter_single": lambda options: (hash(options.reduceOp), options.asyncOp),
}

# By ProcessGroup method: the function of torch.distributed that calls it, and its arguments that replace the options where
# a reduction is among them: the reduction, whether a handle is asked for, and what else the signature depends on.
_API_FUNCTIONS: Final[dict[str, tuple[str, tuple[str, str, str] | None]]] = {
    "allreduce": ("all_reduce", ("op", "async_op", "async_op")),
    "broadcast": ("broadcast", None),
    "reduce": ("reduce", ("op", "async_op", "group_dst")),
    "_allgather_base": ("all_gather_into_tensor", None),
    "all_gather_single": ("all_gather_single", None),
    "_reduce_scatter_base": ("reduce_scatter_tensor", ("op", "async_op", "async_op")),
    "reduce_scatter_single": ("reduce_scatter_single", ("op", "async_op", "async_op")),
}


class ApiFunction(NamedTuple):
    """One function of torch.distributed: its code, and what reads its arguments from its frame's locals."""

    code: CodeType
    arguments: Callable[[Any], tuple[Any, Any, Any]] | None


def find_api_function(method: str) -> ApiFunction | None:
    """The function of torch.distributed that calls ``method``.

    None where it is not as it was when this was written: with those arguments, and in exactly one logging wrapper.
    """
    name, arguments = _API_FUNCTIONS[method]
    function = getattr(distributed_c10d, name, None)
    inner = getattr(function, "__wrapped__", None)
    if (
        not isinstance(function, FunctionType)
        or not isinstance(inner, FunctionType)
        or hasattr(inner, "__wrapped__")
    ):
        return None
    code = inner.__code__
    known = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    if function.__code__.co_filename != c10d_logger.__file__ or not known >= set(arguments or ()):
        return None
    return ApiFunction(code, None if arguments is None else itemgetter(*arguments))


class HeldReductions:
    """Keeps the enum values alive whose addresses are keys."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def hold(self, reduction: Any) -> bool:
        """Whether the address of ``reduction`` may be part of a key: it is held from now on."""
        if type(reduction) is not _REDUCTIONS or len(self._held) > _MOST_HELD:
            return False
        self._held[id(reduction)] = reduction
        return True
