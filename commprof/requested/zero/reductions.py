"""The gradient reductions: the messages of one bucket of ``n`` elements among ``p`` ranks.

========================= =============================================================== ===================
reduction                 messages                                                        bytes sent per rank
========================= =============================================================== ===================
``all_reduce``            one all_reduce of the bucket                                    2(p-1)/p n
``multi_rank_all_reduce`` one all_reduce of the shards of all owners; more when one       2(p-1)/p n
                          parameter is larger than the bucket size
``reduce_to_owner``       one reduce to each rank that owns a shard                       (p-1)/p n
========================= =============================================================== ===================

They are DeepSpeed's, and see a bucket as the shards of its owners. zero_runtime's own ``reduce_scatter`` uses bands instead
(:func:`commprof.requested.zero.gradients.banded_gradients`), or :func:`reduce_scatter` where some parameters are not
partitioned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from commprof.requested.zero.buckets import runs_past
from commprof.requested.zero.partition import OwnedShard
from commprof.schema import Op


class Message(NamedTuple):
    """One collective that carries gradients.

    Attributes:
        op: what is issued.
        numel: elements behind ``payload_bytes``.
        row_numel: elements of each rank's row, where the last rows may be shorter; 0 where there are no rows.
        rows: elements of each rank's row where they have lengths of their own.
    """

    op: Op
    numel: int
    row_numel: int = 0
    rows: tuple[int, ...] = ()

    def row_bytes(self, item_bytes: int, ranks: int) -> tuple[int, ...]:
        """Bytes of the row of each of ``ranks``; of the full message where there are no rows."""
        if self.rows:
            return tuple(each * item_bytes for each in self.rows)
        if not self.row_numel:
            return (self.numel * item_bytes,)
        left = [self.numel - rank * self.row_numel for rank in range(ranks)]
        return tuple(min(self.row_numel, max(0, each)) * item_bytes for each in left)


_LARGEST_PADDING: Final = 1 / 16
Shards = Sequence[OwnedShard]
Reduction = Callable[[Shards, int], list[Message]]


def all_reduce(shards: Shards, capacity: int) -> list[Message]:
    """The whole bucket to every rank."""
    return [Message(Op.ALL_REDUCE, sum(shard.numel for shard in shards))]


def multi_rank_all_reduce(shards: Shards, capacity: int) -> list[Message]:
    """The shards of all owners to every rank; a message is closed once it has more than ``capacity`` elements."""
    sizes = runs_past([shard.numel for shard in shards], capacity)
    return [Message(Op.ALL_REDUCE, numel) for numel in sizes]


def reduce_to_owner(shards: Shards, capacity: int) -> list[Message]:
    """The shards of each owner to that owner, owners in the order of their first shard."""
    by_owner: dict[int, list[int]] = {}
    for shard in shards:
        by_owner.setdefault(shard.owner, []).append(shard.numel)
    return [Message(Op.REDUCE, numel) for sizes in by_owner.values() for numel in runs_past(sizes, capacity)]


def reduce_scatter(shards: Shards, world_size: int, *, exchanges: bool) -> Message:
    """A row for each owner. Only an all_to_all has rows of any length.

    Others are padded to the longest where that adds no more than a sixteenth; otherwise they are sent unpadded, as a list.
    """
    rows = [0] * world_size
    for shard in shards:
        rows[shard.owner] += shard.numel
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
