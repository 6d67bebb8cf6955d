"""Converts entries of torch's Flight Recorder to rows of the ``flight`` table. Standard library only.

gloo lists no sends and receives. It lists the operation that it ran, so a reduce_scatter is listed as an all_reduce.
torch 2.14 and newer record other backends (nccl2, custom ones) through hooks of the process group. These entries have
the same form (version 2.10 of the dump), with some different names: all_to_all_single, split, new_window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from commprof.schema import Op

# The word after the name of the backend, without a leading ``_``. Other words have no operation (``nccl:coalesced``).
OPERATIONS: Final[dict[str, Op]] = {
    "all_reduce": Op.ALL_REDUCE,
    "allreduce_coalesced": Op.ALL_REDUCE,
    "all_reduce_coalesced": Op.ALL_REDUCE,
    "all_reduce_sparse": Op.ALL_REDUCE,
    "sparse_all_reduce": Op.ALL_REDUCE,
    "all_reduce_barrier": Op.BARRIER,
    "barrier": Op.BARRIER,
    "broadcast": Op.BROADCAST,
    "broadcast_oop": Op.BROADCAST,
    "reduce": Op.REDUCE,
    "reduce_oop": Op.REDUCE,
    "all_gather": Op.ALL_GATHER,
    "all_gather_base": Op.ALL_GATHER,
    "allgather_base": Op.ALL_GATHER,
    "allgather_coalesced": Op.ALL_GATHER,
    "all_gather_into_tensor_coalesced": Op.ALL_GATHER,
    "allgather_into_tensor_coalesced": Op.ALL_GATHER,
    "reduce_scatter": Op.REDUCE_SCATTER,
    "reduce_scatter_base": Op.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Op.REDUCE_SCATTER,
    "all_to_all": Op.ALL_TO_ALL,
    "all_to_all_single": Op.ALL_TO_ALL,
    "alltoall_base": Op.ALL_TO_ALL,
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "send": Op.SEND,
    "recv": Op.RECV,
    "recvAnySource": Op.RECV,
    "recv_any_source": Op.RECV,
}

_ITEM_BYTES: Final[dict[str, int]] = {
    **dict.fromkeys(("Bool", "Byte", "Char", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(
        ("Float8_e5m2", "Float8_e4m3fn", "Float8_e5m2fnuz", "Float8_e4m3fnuz", "Float8_e8m0fnu"), 1
    ),
    **dict.fromkeys(("Short", "UInt16", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "UInt32", "Float", "QInt32", "ComplexHalf"), 4),
    **dict.fromkeys(("Long", "UInt64", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


def flight_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an entry of torch's dump to a row of ``flight``, without the columns that name the process.

    Raises:
        KeyError, ValueError: The entry does not have the form that torch writes (version 2.x of its dump).
    """
    name, description = entry["process_group"]
    is_p2p = bool(entry["is_p2p"])
    title = str(entry["profiling_name"])
    return {
        "pg": str(name),
        "group_desc": None if description in ("", "undefined") else str(description),
        "seq": int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        "op_id": int(entry["op_id"]) if "op_id" in entry else None,
        "is_p2p": is_p2p,
        "name": title,
        "op": operation_of(title),
        "input_bytes": bytes_of(entry.get("input_sizes"), entry.get("input_dtypes")),
        "output_bytes": bytes_of(entry.get("output_sizes"), entry.get("output_dtypes")),
        "state": entry.get("state"),
        "time_realtime_ns": entry.get("time_created_ns"),
    }


def operation_of(name: str) -> str | None:
    """Return the operation for a profiling name of a backend, or None if the name has no operation.

    >>> operation_of("nccl:_reduce_scatter_base"), operation_of("nccl:send 0->1"), operation_of("nccl:coalesced")
    ('reduce_scatter', 'send', None)
    """
    words = name.rpartition(":")[2].split()
    operation = OPERATIONS.get(words[0].lstrip("_")) if words else None
    return None if operation is None else operation.value


def bytes_of(sizes: Sequence[Sequence[int]] | None, dtypes: Sequence[str] | None) -> int | None:
    """Return the bytes of tensors with these shapes and C++ dtype names of torch. None if a dtype is not known."""
    if sizes is None or dtypes is None:
        return None
    if len(dtypes) != len(sizes):
        if len(set(dtypes)) != 1:
            return None
        dtypes = [dtypes[0]] * len(sizes)
    if any(dtype not in _ITEM_BYTES for dtype in dtypes):
        return None
    return sum(math.prod(shape) * _ITEM_BYTES[dtype] for shape, dtype in zip(sizes, dtypes, strict=True))
