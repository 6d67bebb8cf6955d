"""Maps NCCL's names of operations, element types and reductions to the terms of the tables.

The numbers of element types and reductions are from ``nccl.h``. The types 0 to 9 are equal in all versions since 2.10,
which added bfloat16. The types 10 and 11 are the two float8 types of 2.24. RCCL's float8 types have the same sizes, and
only the sizes are used.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from commprof.schema import Op

# Bcast is the in-place form; NCCL itself prints it as Broadcast. RCCL writes AllToAll.
OPERATIONS: Final[dict[bytes, Op]] = {
    b"AllReduce": Op.ALL_REDUCE,
    b"Reduce": Op.REDUCE,
    b"ReduceScatter": Op.REDUCE_SCATTER,
    b"AllGather": Op.ALL_GATHER,
    b"Broadcast": Op.BROADCAST,
    b"Bcast": Op.BROADCAST,
    b"AlltoAll": Op.ALL_TO_ALL,
    b"AllToAll": Op.ALL_TO_ALL,
    b"Gather": Op.GATHER,
    b"Scatter": Op.SCATTER,
    b"Send": Op.SEND,
    b"Recv": Op.RECV,
}


class Datatype(NamedTuple):
    """An element type: its name in torch and its size in bytes."""

    name: str
    size: int


DATATYPES: Final[tuple[Datatype, ...]] = (
    Datatype("int8", 1),
    Datatype("uint8", 1),
    Datatype("int32", 4),
    Datatype("uint32", 4),
    Datatype("int64", 8),
    Datatype("uint64", 8),
    Datatype("float16", 2),
    Datatype("float32", 4),
    Datatype("float64", 8),
    Datatype("bfloat16", 2),
    Datatype("float8_e4m3fn", 1),
    Datatype("float8_e5m2", 1),
)

REDUCTIONS: Final[tuple[str, ...]] = ("SUM", "PRODUCT", "MAX", "MIN", "AVG")

# ncclRedOpCreatePreMulSum creates numbers from 5 on. It mixes them with a hash of the communicator's address, so they
# differ from rank to rank, and only the kind is known.
PRE_MULTIPLIED: Final = "PREMUL_SUM"

REDUCING: Final = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER})
ROOTED: Final = frozenset({Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER})
POINT_TO_POINT: Final = frozenset({Op.SEND, Op.RECV})

# For these operations NCCL prints the count of one rank. The payload is the count times the number of ranks.
COUNTED_PER_RANK: Final = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER})
