"""The gradient reductions: what becomes of one bucket of ``n`` elements among ``p`` ranks.

========================= =============================================================== ===================
reduction                 messages                                                        bytes sent per rank
========================= =============================================================== ===================
``all_reduce``            one all_reduce of the bucket                                    2(p-1)/p n
``multi_rank_all_reduce`` one all_reduce of the slices of all owners; more when one       2(p-1)/p n
                          parameter is larger than the bucket size
``reduce_to_owner``       one reduce to each rank that owns a part                        (p-1)/p n
``reduce_scatter``        one reduce_scatter of a row for each owner, or one all_to_all   (p-1)/p n
                          of the rows, which the owners then add up
========================= =============================================================== ===================

The first three are DeepSpeed's, the fourth is zero_runtime's own. Each takes a bucket as the slices of its owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from commprof.requested.buckets import runs_past
from commprof.requested.partition import OwnedSlice
from commprof.schema import Op

# A native reduce_scatter wants equal rows: they are padded where that adds at most this part to the bucket.
LARGEST_PADDING: Final = 1 / 16


class Message(NamedTuple):
    """One collective that carries gradients.

    Attributes:
        op: what is issued.
        numel: elements behind ``payload_bytes``.
    """

    op: Op
    numel: int


Slices = Sequence[OwnedSlice]
Reduction = Callable[[Slices, int], list[Message]]


def all_reduce(slices: Slices, capacity: int) -> list[Message]:
    """The whole bucket to every rank."""
    return [Message(Op.ALL_REDUCE, sum(piece.numel for piece in slices))]


def multi_rank_all_reduce(slices: Slices, capacity: int) -> list[Message]:
    """The slices of all owners to every rank; a message is closed once it has more than ``capacity`` elements."""
    sizes = runs_past([piece.numel for piece in slices], capacity)
    return [Message(Op.ALL_REDUCE, numel) for numel in sizes]


def reduce_to_owner(slices: Slices, capacity: int) -> list[Message]:
    """The slices of each owner to that owner, owners in the order of their first slice."""
    by_owner: dict[int, list[int]] = {}
    for piece in slices:
        by_owner.setdefault(piece.owner, []).append(piece.numel)
    return [Message(Op.REDUCE, numel) for sizes in by_owner.values() for numel in runs_past(sizes, capacity)]


def exchange_and_sum(slices: Slices, capacity: int) -> list[Message]:
    """One all_to_all that sends each owner its row; rows may differ in length, so nothing is padded."""
    return [Message(Op.ALL_TO_ALL, sum(piece.numel for piece in slices))]


def native_reduce_scatter(slices: Slices, capacity: int, world_size: int) -> list[Message]:
    """One reduce_scatter of a row for each owner, padded to equal length where that costs little."""
    rows = [0] * world_size
    for piece in slices:
        rows[piece.owner] += piece.numel
    numel, padded = sum(rows), max(rows) * world_size
    return [Message(Op.REDUCE_SCATTER, padded if padded <= numel * (1 + LARGEST_PADDING) else numel)]


def reduction(name: str, implementation: str, world_size: int) -> Reduction:
    """The reduction called ``name``; ``implementation`` is ``native`` or ``all_to_all``, for a reduce_scatter."""
    if name != "reduce_scatter":
        return DEEPSPEED_REDUCTIONS[name]
    if implementation == "all_to_all":
        return exchange_and_sum
    return partial(native_reduce_scatter, world_size=world_size)


DEEPSPEED_REDUCTIONS: Final[dict[str, Reduction]] = {
    "all_reduce": all_reduce,
    "multi_rank_all_reduce": multi_rank_all_reduce,
    "reduce_to_owner": reduce_to_owner,
}
