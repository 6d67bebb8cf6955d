"""The gradient reductions: the messages of one bucket of ``n`` elements among ``p`` ranks.

========================= =============================================================== ===================
reduction                 messages                                                        bytes sent per rank
========================= =============================================================== ===================
``all_reduce``            one all_reduce of the bucket                                    2(p-1)/p n
``multi_rank_all_reduce`` one all_reduce of the shards of all owners; more when one       2(p-1)/p n
                          parameter is larger than the bucket size
``reduce_to_owner``       one reduce to each rank that owns a shard                       (p-1)/p n
========================= =============================================================== ===================

The gradients of experts are in the same buckets as others. Each process group of a bucket has messages of its own, in the
order in which the groups first occur in it (DeepSpeed 0.19.8, ``average_tensor``).

They are DeepSpeed's, and see a bucket as the shards of its owners. zero_runtime's own ``reduce_scatter`` uses chunks instead
(:func:`commprof.requested.zero.gradients.chunked_gradients`), or :func:`reduce_scatter` where some parameters are not
partitioned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from commprof.requested.zero.bucket_rules import runs_past
from commprof.requested.zero.partition import OwnedShard
from commprof.schema import Op


class Message(NamedTuple):
    """One collective that carries gradients.

    Attributes:
        op: what is issued.
        numel: elements behind ``payload_bytes``.
        row_numel: elements of each rank's row, where the last rows may be shorter; 0 where there are no rows.
        rows: elements of each rank's row where they have lengths of their own.
        padding: those of ``numel`` that carry no data.
        ep_size: of experts, whose expert-data group it is sent within; None for all ranks.
    """

    op: Op
    numel: int
    row_numel: int = 0
    rows: tuple[int, ...] = ()
    padding: int = 0
    ep_size: int | None = None

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


class Terms(NamedTuple):
    """What the messages of a bucket depend on beside its shards.

    Attributes:
        capacity: elements of a bucket (``reduce_bucket_size``).
        ranks: ranks that reduce dense gradients.
        exchanges: a reduce_scatter is an all_to_all and a local sum.
    """

    capacity: int
    ranks: int
    exchanges: bool


Reduction = Callable[[Shards, Terms], list[Message]]


def all_reduce(shards: Shards, terms: Terms) -> list[Message]:
    """The whole bucket to every rank."""
    return [Message(Op.ALL_REDUCE, sum(shard.numel for shard in shards))]


def multi_rank_all_reduce(shards: Shards, terms: Terms) -> list[Message]:
    """The shards of all owners to every rank of their group; a message is closed once it exceeds the capacity."""
    by_group: dict[int | None, list[int]] = {}
    for shard in shards:
        by_group.setdefault(shard.ep_size, []).append(shard.numel)
    return [
        Message(Op.ALL_REDUCE, numel, ep_size=ep_size)
        for ep_size, sizes in by_group.items()
        for numel in runs_past(sizes, terms.capacity)
    ]


def reduce_to_owner(shards: Shards, terms: Terms) -> list[Message]:
    """The shards of each owner to that owner, owners in the order of their first shard."""
    by_owner: dict[tuple[int, int | None], list[int]] = {}
    for shard in shards:
        by_owner.setdefault((shard.owner, shard.ep_size), []).append(shard.numel)
    return [
        Message(Op.REDUCE, numel, ep_size=ep_size)
        for (_, ep_size), sizes in by_owner.items()
        for numel in runs_past(sizes, terms.capacity)
    ]


def reduce_scatter(shards: Shards, terms: Terms) -> list[Message]:
    """A row for each owner. Only an all_to_all has rows of any length.

    Others are padded to the longest where that adds no more than a sixteenth; otherwise they are sent unpadded, as a list.
    """
    by_group: dict[int | None, list[int]] = {}
    for shard in shards:
        rows = by_group.setdefault(shard.ep_size, [0] * (terms.ranks // (shard.ep_size or 1)))
        rows[shard.owner] += shard.numel
    return [_rows_of_owners(tuple(rows), ep_size, terms.exchanges) for ep_size, rows in by_group.items()]


def _rows_of_owners(rows: tuple[int, ...], ep_size: int | None, exchanges: bool) -> Message:
    if exchanges:
        return Message(Op.ALL_TO_ALL, sum(rows), rows=rows, ep_size=ep_size)
    padded = max(rows) * len(rows)
    if padded > sum(rows) * (1 + _LARGEST_PADDING):
        return Message(Op.REDUCE_SCATTER, sum(rows), rows=rows, ep_size=ep_size)
    return Message(Op.REDUCE_SCATTER, padded, max(rows), padding=padded - sum(rows), ep_size=ep_size)


class StatedReduction(NamedTuple):
    """What is known about one value of ``zero_optimization.gradient_reduction``.

    Attributes:
        op: the operation that the value names.
        sent: what a runtime sends for it, as the end of a sentence.
        stages: the ZeRO stages at which zero_runtime accepts it.
        messages: the messages of one bucket of owners' shards.
    """

    op: Op
    sent: str
    stages: tuple[int, ...]
    messages: Reduction


REDUCTIONS: Final[dict[str, StatedReduction]] = {
    "all_reduce": StatedReduction(Op.ALL_REDUCE, "one all_reduce per bucket", (0, 1, 2, 3), all_reduce),
    "multi_rank_all_reduce": StatedReduction(
        Op.ALL_REDUCE, "one all_reduce per bucket", (1, 2), multi_rank_all_reduce
    ),
    "reduce_to_owner": StatedReduction(Op.REDUCE, "one reduce per bucket and owner", (1, 2), reduce_to_owner),
    "reduce_scatter": StatedReduction(
        Op.REDUCE_SCATTER,
        "one reduce_scatter per bucket (on gloo an all_to_all and a local sum)",
        (1, 2, 3),
        reduce_scatter,
    ),
}
