"""Operators that issue collectives without ProcessGroup's methods, and readers that return the collectives of a call.

``_c10d_functional`` (DTensor, compiled code) is implemented in C++. Operators of frameworks communicate themselves,
outside of c10d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from commprof.recorder.dispatcher.operators import METHOD, Issued, Reader, reduction_name
from commprof.recorder.process_group.signatures import CallOptions, Planned


def _gathered(tensor: Any, size: int) -> Planned:
    return Planned((tensor.shape[0] * size if tensor.dim() else size, *tensor.shape[1:]), tensor)


def _scattered(tensor: Any, size: int) -> Planned:
    return Planned((tensor.shape[0] // size, *tensor.shape[1:]), tensor)


def _in_place(method: str) -> Reader:
    """Return a reader of the arguments (tensor or tensors, reduction or root, group)."""
    known = METHOD[method]
    rooted = method == "broadcast"

    def read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Issued]:
        reduction_or_root = args[1]
        options = (
            CallOptions(None, reduction_or_root, True)
            if rooted
            else CallOptions(reduction_name(reduction_or_root), None, True)
        )
        tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        return (Issued(known, args[2], (tensors, options)),)

    return read


def _all_gather(method: str) -> Reader:
    """Return a reader of the arguments (input or inputs, group size, group, out=...)."""
    known = METHOD[method]

    def read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Issued]:
        inputs, size = args[0], args[1]
        inputs = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        outputs = [_gathered(tensor, size) for tensor in inputs]
        return (Issued(known, args[2], (outputs, inputs, CallOptions(None, None, True))),)

    return read


def _reduce_scatter(method: str) -> Reader:
    """Return a reader of the arguments (input or inputs, reduction, group size, group, out=...)."""
    known = METHOD[method]

    def read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Issued]:
        inputs, reduction, size = args[0], args[1], args[2]
        inputs = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        outputs = [_scattered(tensor, size) for tensor in inputs]
        options = CallOptions(reduction_name(reduction), None, True)
        return (Issued(known, args[3], (outputs, inputs, options)),)

    return read


def _all_to_all(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Issued]:
    """Read the arguments (input, output split sizes, input split sizes, group)."""
    tensor, output_rows, input_rows = args[0], args[1], args[2]
    output = Planned((sum(output_rows), *tensor.shape[1:]), tensor) if output_rows else tensor
    values = (output, tensor, output_rows, input_rows, CallOptions(None, None, True))
    return (Issued(METHOD["alltoall_base"], args[3], values),)


def _shard_dim_all_to_all(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Issued]:
    """Read the arguments (input, gathered dimension, sharded dimension, group). Output and input have equal sizes."""
    tensor = args[0]
    return (Issued(METHOD["alltoall_base"], args[3], (tensor, tensor, CallOptions(None, None, True))),)


def _message(method: str) -> Reader:
    """Return a reader of the arguments (tensor, peer, tag, group)."""
    known = METHOD[method]

    def read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Issued]:
        return (Issued(known, args[3], ([args[0]], args[1])),)

    return read


def _messages(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Issued]:
    """Read the arguments (kinds, peers, tags, tensors, group), which describe one message for each list position."""
    kinds = {"isend": METHOD["send"], "irecv": METHOD["recv"]}
    return [
        Issued(kinds[kind], args[4], ([tensor], peer))
        for kind, peer, tensor in zip(args[0], args[1], args[3], strict=True)
    ]


# Operators that C++ implements with methods of ProcessGroup, without Python.
FUNCTIONAL: Final[dict[str, Reader]] = {
    **{
        f"_c10d_functional::{operator}": reader
        for operator, reader in {
            "all_reduce": _in_place("allreduce"),
            "all_reduce_": _in_place("allreduce"),
            "all_reduce_coalesced": _in_place("allreduce_coalesced"),
            "all_reduce_coalesced_": _in_place("allreduce_coalesced"),
            "broadcast": _in_place("broadcast"),
            "broadcast_": _in_place("broadcast"),
            "all_gather_into_tensor": _all_gather("allgather_into_tensor_coalesced"),
            "all_gather_into_tensor_out": _all_gather("_allgather_base"),
            "all_gather_into_tensor_coalesced": _all_gather("allgather_into_tensor_coalesced"),
            "reduce_scatter_tensor": _reduce_scatter("reduce_scatter_tensor_coalesced"),
            "reduce_scatter_tensor_out": _reduce_scatter("_reduce_scatter_base"),
            "reduce_scatter_tensor_coalesced": _reduce_scatter("reduce_scatter_tensor_coalesced"),
            "all_to_all_single": _all_to_all,
            "isend": _message("send"),
            "irecv": _message("recv"),
            "batch_p2p_ops": _messages,
        }.items()
    },
    "_dtensor::shard_dim_alltoall": _shard_dim_all_to_all,
}
WAIT: Final = "_c10d_functional::wait_tensor"


def _world_all_reduce(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Issued]:
    """Read the argument (tensor) of a sum over all ranks."""
    return (Issued(METHOD["allreduce"], None, ([args[0]], CallOptions("SUM", None, False)), False),)


# Operators that communicate without c10d: DeepSpeed's all_reduce among the ranks of one host, through shared memory.
FRAMEWORK: Final[dict[str, Reader]] = {
    "deepspeed::inference_all_reduce": _world_all_reduce,
    "deepspeed::inference_all_reduce_": _world_all_reduce,
}
