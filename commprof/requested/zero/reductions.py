"""The gradient reductions: what becomes of one bucket of ``n`` elements among ``p`` ranks.

========================= =============================================================== ===================
reduction                 messages                                                        bytes sent per rank
========================= =============================================================== ===================
``all_reduce``            one all_reduce of the bucket                                    2(p-1)/p n
``multi_rank_all_reduce`` one all_reduce of the slices of all owners; more when one       2(p-1)/p n
                          parameter is larger than the bucket size
``reduce_to_owner``       one reduce to each rank that owns a part                        (p-1)/p n
========================= =============================================================== ===================

They are DeepSpeed's, and take a bucket as the slices of its owners. zero_runtime's own ``reduce_scatter`` has bands in place
of such buckets (:func:`commprof.requested.zero.gradients.banded_gradients`), but where some parameters are not partitioned:
then :func:`reduce_scatter` says what becomes of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from commprof.requested.zero.buckets import runs_past
from commprof.requested.zero.partition import OwnedSlice
from commprof.schema import Op


class Message(NamedTuple):
    """One collective that carries gradients.

    Attributes:
        op: what is issued.
        numel: elements behind ``payload_bytes``.
        row_numel: elements of each rank's row, of which the last ones may lack some; 0 where there are no rows.
        rows: elements of each rank's row where they have lengths of their own.
    """

    op: Op
    numel: int
    row_numel: int = 0
    rows: tuple[int, ...] = ()

    def row_bytes(self, item_bytes: int, ranks: int) -> tuple[int, ...]:
        """Bytes of the row of each of ``ranks``; of the whole where there are no rows."""
        if self.rows:
            return tuple(each * item_bytes for each in self.rows)
        if not self.row_numel:
            return (self.numel * item_bytes,)
        left = [self.numel - rank * self.row_numel for rank in range(ranks)]
        return tuple(min(self.row_numel, max(0, each)) * item_bytes for each in left)


_LARGEST_PADDING: Final = 1 / 16
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


def reduce_scatter(slices: Slices, world_size: int, *, exchanges: bool) -> Message:
    """A row for each owner. Only an all_to_all has rows of any length.

    Others are padded to the longest where that adds no more than a sixteenth; otherwise they go as they are, in a list.
    """
    rows = [0] * world_size
    for piece in slices:
        rows[piece.owner] += piece.numel
    if exchanges:
        return Message(Op.ALL_TO_ALL, sum(rows), rows=tuple(rows))
    padded = max(rows) * world_size
    if padded > sum(rows) * (1 + _LARGEST_PADDING):
        return Message(Op.REDUCE_SCATTER, sum(rows), rows=tuple(rows))
    return Message(Op.REDUCE_SCATTER, padded, max(rows))


DEEPSPEED_REDUCTIONS: Final[dict[str, Reduction]] = {
    "all_reduce": all_reduce,
    "multi_rank_all_reduce": multi_rank_all_reduce,
    "reduce_to_owner": reduce_to_owner,
}
