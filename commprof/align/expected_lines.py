"""Determine which log lines a record should leave, from the NCCL operations that torch calls for it.

Source: ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`` and ``torch/csrc/cuda/nccl.cpp``.

==================  ==========================================================================================
record              lines on this rank
==================  ==========================================================================================
all_reduce          AllReduce; one for each tensor of a coalesced call
broadcast, reduce   Broadcast, Reduce with the root
all_gather          AllGather; for each tensor of a coalesced call; outputs of unequal size: a Broadcast per rank
reduce_scatter      ReduceScatter; for each tensor of a coalesced call; inputs of unequal size: a Reduce per rank
all_to_all          a Send and a Recv per rank, itself included; or a single AlltoAll, if the call has no splits
gather, scatter     root: a Recv (Send) per other rank; others: one Send (Recv) with the root; or a single line
send, recv          Send, Recv with the peer
barrier             AllReduce of one element
==================  ==========================================================================================

Sends and Recvs of an all_to_all have the sizes of the record's splits. A torch that is built for NCCL 2.13 or newer
also calls NCCL for empty sends and receives, and NCCL prints them. An older torch does not call NCCL for them. A call
with splits (even equal splits) or with lists of tensors is never a single AlltoAll. If the splits are not known, the
expectation is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from commprof.schema import Op, parse_ranks, parse_splits

_OF_LISTS: Final = "alltoall"  # the method of ProcessGroup with one tensor for each rank


class Expected(NamedTuple):
    """One operation line: the values that match a record.

    ``other`` is the root or peer, as its rank in the group.
    """

    op: str
    message_bytes: int
    other: int | None


class Call(NamedTuple):
    """The columns of a record that determine which NCCL operations are called."""

    op: str
    backend_method: str
    num_tensors: int
    sizes: str | None
    numel: int
    payload_bytes: int
    peer: int
    group_ranks: str
    group_rank: int
    output_bytes: int = 0
    input_splits: str | None = None
    output_splits: str | None = None
    coalesced: bool = False


class Dialect(NamedTuple):
    """Behavior of torch and NCCL that depends on their versions, derived from the lines of one communicator.

    Attributes:
        single_lines: The operations among all_to_all, gather and scatter that appear as one line (NCCL 2.28
            and newer).
        barrier_bytes: The size in bytes of the element that a barrier reduces.
        prints_empty: Whether empty sends and receives have lines.
        divided: The payloads in bytes of all_to_alls that appear only as messages, although other all_to_alls
            appear as one line. These are calls with equal splits, which a record does not distinguish from
            calls without splits.
    """

    single_lines: frozenset[str]
    barrier_bytes: int
    prints_empty: bool = False
    divided: frozenset[int] = frozenset()


PLAIN_DIALECT = Dialect(frozenset(), 4)


def expected_lines(call: Call, dialect: Dialect) -> tuple[Expected, ...] | None:
    """Return the lines that ``call`` leaves on its rank, in order, or None if the record does not determine them."""
    if call.op == Op.BARRIER:
        return (Expected(Op.ALL_REDUCE, dialect.barrier_bytes, None),)
    size = call.payload_bytes // call.numel if call.numel else 0
    inputs, outputs = tensor_sizes(call.sizes)
    other = _group_rank(call.peer, call.group_ranks)
    if call.op == Op.ALL_TO_ALL:
        return _all_to_all(call, dialect)
    if call.op in (Op.GATHER, Op.SCATTER):
        if call.op in dialect.single_lines:
            return (Expected(call.op, call.payload_bytes, other),)
        return _rooted_messages(call, other)
    if call.op == Op.ALL_REDUCE and len(inputs) > 1:
        return tuple(Expected(call.op, numel * size, None) for numel in inputs)
    if call.op == Op.ALL_GATHER:
        return _gathers(call, inputs, outputs, size)
    if call.op == Op.REDUCE_SCATTER:
        return _scatters(call, inputs, outputs, size)
    return (Expected(call.op, call.payload_bytes, other),)


def tensor_sizes(text: str | None) -> tuple[list[int], list[int]]:
    """Return the numbers of elements of each input and of each output tensor.

    >>> tensor_sizes("4x16;2->8"), tensor_sizes("()"), tensor_sizes(None)
    (([64, 2], [8]), ([1], []), ([], []))
    """
    inputs, _, outputs = (text or "").partition("->")
    return _elements(inputs), _elements(outputs)


def _elements(shapes: str) -> list[int]:
    return [
        1 if shape == "()" else math.prod(int(side) for side in shape.split("x"))
        for shape in shapes.split(";")
        if shape
    ]


def _group_rank(peer: int, group_ranks: str) -> int | None:
    """Return the rank within the group of a global rank, or None if the rank is not in the group."""
    ranks = parse_ranks(group_ranks)
    return ranks.index(peer) if peer in ranks else None


def _gathers(call: Call, inputs: Sequence[int], outputs: Sequence[int], size: int) -> tuple[Expected, ...]:
    if "coalesced" in call.backend_method and len(inputs) > 1:
        nranks = len(parse_ranks(call.group_ranks))
        return tuple(Expected(call.op, numel * nranks * size, None) for numel in inputs)
    if len(set(outputs)) > 1:
        return tuple(Expected(Op.BROADCAST, numel * size, rank) for rank, numel in enumerate(outputs))
    return (Expected(call.op, call.payload_bytes, None),)


def _scatters(call: Call, inputs: Sequence[int], outputs: Sequence[int], size: int) -> tuple[Expected, ...]:
    if "coalesced" in call.backend_method and len(outputs) > 1:
        nranks = len(parse_ranks(call.group_ranks))
        return tuple(Expected(call.op, numel * nranks * size, None) for numel in outputs)
    if len(set(inputs)) > 1:
        return tuple(Expected(Op.REDUCE, numel * size, rank) for rank, numel in enumerate(inputs))
    return (Expected(call.op, call.payload_bytes, None),)


def _all_to_all(call: Call, dialect: Dialect) -> tuple[Expected, ...] | None:
    has_splits = call.input_splits is not None or call.output_splits is not None
    if (
        call.op in dialect.single_lines
        and call.backend_method != _OF_LISTS
        and not has_splits
        and call.payload_bytes not in dialect.divided
    ):
        return (Expected(call.op, call.payload_bytes, None),)
    sides = _parts(call, has_splits)
    if sides is None:
        return None
    return tuple(
        Expected(op, size, rank)
        for rank, sizes in enumerate(zip(*sides, strict=True))
        for op, size in zip((Op.SEND, Op.RECV), sizes, strict=True)
        if size or dialect.prints_empty
    )


def _parts(call: Call, has_splits: bool) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return the bytes to and from each rank, or None if they are not known."""
    nranks = len(parse_ranks(call.group_ranks))
    inputs, outputs = tensor_sizes(call.sizes)
    if not has_splits and call.backend_method == _OF_LISTS and len(inputs) == len(outputs) == nranks:
        # A trace of schema 1 has no splits, but the shapes of the lists contain the same sizes.
        elements = call.numel or sum(outputs)
        size = (call.payload_bytes or call.output_bytes) // elements if elements else 0
        return [numel * size for numel in inputs], [numel * size for numel in outputs]
    if not has_splits and sum(inputs) != sum(outputs):
        return None  # a trace of schema 1 with unequal splits
    sent = _split(call.input_splits, call.payload_bytes, nranks)
    received = _split(call.output_splits, call.output_bytes if has_splits else call.payload_bytes, nranks)
    return None if sent is None or received is None else (sent, received)


def _split(text: str | None, size: int, nranks: int) -> Sequence[int] | None:
    """Return the splits in ``text``, or without ``text`` equal splits of ``size`` bytes in total.

    The result is None if ``size`` is not divisible by the number of ranks.
    """
    if text is not None:
        return parse_splits(text, nranks)
    return None if size % nranks else (size // nranks,) * nranks


def _rooted_messages(call: Call, root: int | None) -> tuple[Expected, ...]:
    """Return the messages of gather and scatter between the root and each other rank.

    The chunk of the root itself is copied, not sent.
    """
    nranks = len(parse_ranks(call.group_ranks))
    message = call.payload_bytes // nranks
    is_root = call.group_rank == root
    op = Op.SEND if (call.op == Op.SCATTER) == is_root else Op.RECV
    if not is_root:
        return (Expected(op, message, root),)
    return tuple(Expected(op, message, rank) for rank in range(nranks) if rank != root)
