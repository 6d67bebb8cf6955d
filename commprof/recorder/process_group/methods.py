"""The methods of torch's ProcessGroup that are collectives, and the layout of their arguments.

torch 2.14 has all of these names. torch 2.13 has all names except ``gather_single`` and ``gather_into_tensor``. torch
2.11 has none of the names with ``_single``. The interception wraps the methods that exist.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple

from commprof.schema import Op


class Shape(Enum):
    """The layout of a method's positional arguments."""

    BUFFERS = auto()  # (tensors, opts): each tensor is read and written
    OUTPUTS_INPUTS = auto()  # (outputs, inputs, opts)
    PEER = auto()  # (tensors, group rank of the peer, tag)
    ANY_PEER = auto()  # (tensors, tag)
    NONE = auto()  # (opts) or (timeout, ...)


class Method(NamedTuple):
    """One method of ProcessGroup."""

    name: str
    op: Op
    shape: Shape

    @property
    def is_p2p(self) -> bool:
        """Whether the method is a send or a receive."""
        return self.shape in (Shape.PEER, Shape.ANY_PEER)

    @property
    def blocks(self) -> bool:
        """Whether the method returns only when all ranks have arrived, and returns no handle."""
        return self.name == "monitored_barrier"


_B, _OI = Shape.BUFFERS, Shape.OUTPUTS_INPUTS

METHODS: Final[tuple[Method, ...]] = (
    Method("allreduce", Op.ALL_REDUCE, _B),
    Method("allreduce_coalesced", Op.ALL_REDUCE, _B),
    Method("broadcast", Op.BROADCAST, _B),
    Method("reduce", Op.REDUCE, _B),
    Method("allgather", Op.ALL_GATHER, _OI),
    Method("_allgather_base", Op.ALL_GATHER, _OI),
    Method("all_gather_single", Op.ALL_GATHER, _OI),
    Method("allgather_coalesced", Op.ALL_GATHER, _OI),
    Method("allgather_into_tensor_coalesced", Op.ALL_GATHER, _OI),
    Method("all_gather_single_coalesced", Op.ALL_GATHER, _OI),
    Method("reduce_scatter", Op.REDUCE_SCATTER, _OI),
    Method("_reduce_scatter_base", Op.REDUCE_SCATTER, _OI),
    Method("reduce_scatter_single", Op.REDUCE_SCATTER, _OI),
    Method("reduce_scatter_tensor_coalesced", Op.REDUCE_SCATTER, _OI),
    Method("reduce_scatter_single_coalesced", Op.REDUCE_SCATTER, _OI),
    Method("alltoall", Op.ALL_TO_ALL, _OI),
    Method("alltoall_base", Op.ALL_TO_ALL, _OI),
    Method("all_to_all_single", Op.ALL_TO_ALL, _OI),
    Method("gather", Op.GATHER, _OI),
    Method("gather_single", Op.GATHER, _OI),
    Method("gather_into_tensor", Op.GATHER, _OI),
    Method("scatter", Op.SCATTER, _OI),
    Method("barrier", Op.BARRIER, Shape.NONE),
    Method("monitored_barrier", Op.BARRIER, Shape.NONE),
    Method("send", Op.SEND, Shape.PEER),
    Method("recv", Op.RECV, Shape.PEER),
    Method("recv_anysource", Op.RECV, Shape.ANY_PEER),
)
