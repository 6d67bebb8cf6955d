"""The operators of c10d, which every method of ProcessGroup calls, and readers of their arguments.

The readers return the arguments in the form of the methods' arguments. C++ calls these operators without a method of
ProcessGroup in Python: DDP's reducer does this, and so do the functional operators (``functional``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from commprof.recorder.dispatcher.registration import arguments_of, operator_names
from commprof.recorder.process_group.methods import METHODS, Method, Shape
from commprof.recorder.process_group.signatures import CallOptions

METHOD: Final = {method.name: method for method in METHODS}

# By operator of c10d: the method of ProcessGroup that calls the operator.
C10D: Final[dict[str, Method]] = {
    f"c10d::{operator}": METHOD[method]
    for operator, method in {
        "allreduce_": "allreduce",
        "allreduce_coalesced_": "allreduce_coalesced",
        "broadcast_": "broadcast",
        "reduce_": "reduce",
        "allgather_": "allgather",
        "_allgather_base_": "_allgather_base",
        "allgather_coalesced_": "allgather_coalesced",
        "allgather_into_tensor_coalesced_": "allgather_into_tensor_coalesced",
        "reduce_scatter_": "reduce_scatter",
        "_reduce_scatter_base_": "_reduce_scatter_base",
        "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
        "alltoall_": "alltoall",
        "alltoall_base_": "alltoall_base",
        "gather_": "gather",
        "gather_into_tensor_": "gather_into_tensor",
        "scatter_": "scatter",
        "barrier": "barrier",
        "monitored_barrier_": "monitored_barrier",
        "send": "send",
        "recv_": "recv",
        "recv_any_source_": "recv_anysource",
    }.items()
}

# The operators that DDP's reducer and two helper functions of torch call from C++.
ISSUED_IN_CPP: Final = ("c10d::allreduce_", "c10d::broadcast_", "c10d::allgather_")


_SPLITS: Final = ("output_split_sizes", "input_split_sizes")


class Issued(NamedTuple):
    """A collective that a call of an operator issues.

    Attributes:
        method: The method of ProcessGroup that executes the collective.
        group: The process group: a boxed ProcessGroup, its name, or None for the group of all ranks.
        values: The tensors and options, in the form that
            :func:`commprof.recorder.process_group.signatures.describe` accepts.
        is_async: Whether the issuer continues before the collective is complete.
    """

    method: Method
    group: Any
    values: tuple[Any, ...]
    is_async: bool = True


Reader = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Issued]]


class Layout(NamedTuple):
    """The positions of an operator's arguments; None for an argument that the operator does not have."""

    group: int
    reduction: int | None
    root: int | None  # the position of the root, or of the peer of a message
    asynchronous: int | None
    splits: tuple[int, ...] = ()  # the positions of the rows from and to each rank


def layout(arguments: Sequence[tuple[str, str]]) -> Layout:
    """Return the layout of an operator of c10d, from the argument names and types of its schema.

    >>> layout([("tensors", "List[Tensor]"), ("process_group", "__torch__.torch.classes.c10d.ProcessGroup"), ("dst", "int")])
    Layout(group=1, reduction=None, root=2, asynchronous=None, splits=())

    Raises:
        ValueError: The operator takes no process group.
    """
    names = [name for name, _ in arguments]
    types = [kind.rpartition(".")[2] for _, kind in arguments]

    def first(candidates: Sequence[str], among: Sequence[str]) -> int | None:
        return next((position for position, item in enumerate(among) if item in candidates), None)

    group = first(("ProcessGroup",), types)
    if group is None:
        raise ValueError(f"no argument among {', '.join(names)} is a process group")
    return Layout(
        group,
        first(("ReduceOp",), types),
        first(("root_rank", "dst", "src"), names),
        first(("asyncOp", "async_op"), names),
        tuple(position for position, name in enumerate(names) if name in _SPLITS),
    )


def takes_a_group(operator: str) -> bool:
    """Return whether ``operator`` takes a process group in this version of torch."""
    try:
        layout(arguments_of(operator))
    except (ValueError, RuntimeError):
        return False
    return True


def unknown_operators() -> list[str]:
    """Return the operators of c10d that take a process group and are not in :data:`C10D`."""
    return [name for name in operator_names("c10d") if name not in C10D and takes_a_group(name)]


def tensor_arguments(method: Method) -> int:
    """Return how many leading arguments of the operator below ``method`` are tensors."""
    return {Shape.OUTPUTS_INPUTS: 2, Shape.NONE: 0}.get(method.shape, 1)


def read_c10d(method: Method, places: Layout) -> Reader:
    """Return the reader of the arguments of the operator below ``method``.

    torch omits trailing arguments that have their default values.
    """
    tensors = tensor_arguments(method)

    def read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Issued]:
        def value(position: int | None, default: Any) -> Any:
            return default if position is None or position >= len(args) else args[position]

        root = value(places.root, None)
        is_async = bool(value(places.asynchronous, True)) and not method.blocks
        if method.is_p2p:
            values = (args[0],) if root is None else (args[0], root)
        else:
            options = CallOptions(reduction_name(value(places.reduction, None)), root, is_async)
            values = (*args[:tensors], *(args[position] for position in places.splits), options)
        return (Issued(method, args[places.group], values, is_async),)

    return read


def reduction_name(reduction: Any) -> str | None:
    """Return the name of a reduction (``SUM``), for a boxed ReduceOp or the text that functional operators take."""
    if reduction is None:
        return None
    if isinstance(reduction, str):
        return reduction.upper()
    return _REDUCTIONS.get(int(reduction.op()))


def _reduction_numbers() -> dict[int, str]:
    from torch._C._distributed_c10d import ReduceOp

    return {int(kind.value): name for name, kind in ReduceOp.RedOpType.__members__.items()}


_REDUCTIONS: Final = _reduction_numbers()
