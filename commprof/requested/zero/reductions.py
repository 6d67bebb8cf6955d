"""The gradient reductions, which determine the messages of one bucket of ``n`` elements among ``p`` ranks.

========================= =============================================================== ===================
reduction                 messages                                                        bytes sent per rank
========================= =============================================================== ===================
``all_reduce``            one all_reduce of the bucket                                    2(p-1)/p n
``multi_rank_all_reduce`` one all_reduce of the shards of all owners; more when one       2(p-1)/p n
                          parameter is larger than the bucket size
``reduce_to_owner``       one reduce to each rank that owns a shard                       (p-1)/p n
========================= =============================================================== ===================

The gradients of experts are in the same buckets as other gradients. Each process group of a bucket has its own
messages, in the order in which the groups first occur in the bucket (DeepSpeed 0.19.8, ``average_tensor``).

These three reductions are DeepSpeed's. They treat a bucket as the shards of its owners. ``reduce_scatter`` exists only
in zero_runtime, which reduces chunks (:func:`commprof.requested.zero.gradients.chunked_gradients`). If some parameters
are not partitioned, or if the model has experts, zero_runtime uses :func:`reduce_scatter` instead.
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
        op: The operation that is issued.
        numel: The number of elements in the payload.
        row_numel: The number of elements of each rank's row, or 0 if the message has no equal rows. The last rows may
            be shorter.
        rows: The number of elements of each rank's row, if the rows have individual lengths.
        padding: The number of elements of ``numel`` that contain no data.
        ep_size: The ``ep_size`` of experts, if the message is sent within their expert-data groups. None for all ranks.
    """

    op: Op
    numel: int
    row_numel: int = 0
    rows: tuple[int, ...] = ()
    padding: int = 0
    ep_size: int | None = None

    def row_bytes(self, item_bytes: int, ranks: int) -> tuple[int, ...]:
        """Return the bytes of each rank's row, or the bytes of the full message if it has no rows."""
        if self.rows:
            return tuple(each * item_bytes for each in self.rows)
        if not self.row_numel:
            return (self.numel * item_bytes,)
        left = [self.numel - rank * self.row_numel for rank in range(ranks)]
        return tuple(min(self.row_numel, max(0, each)) * item_bytes for each in left)


_LARGEST_PADDING: Final = 1 / 16
Shards = Sequence[OwnedShard]


class Terms(NamedTuple):
    """The values that determine the messages of a bucket, in addition to its shards.

    Attributes:
        capacity: The maximum number of elements of a bucket (``reduce_bucket_size``).
        ranks: The number of ranks that reduce dense gradients.
        exchanges: Whether a reduce_scatter is issued as an all_to_all and a local sum.
    """

    capacity: int
    ranks: int
    exchanges: bool


Reduction = Callable[[Shards, Terms], list[Message]]


def all_reduce(shards: Shards, terms: Terms) -> list[Message]:
    """Return one all_reduce, which sends the sum of the full bucket to every rank."""
    return [Message(Op.ALL_REDUCE, sum(shard.numel for shard in shards))]


def multi_rank_all_reduce(shards: Shards, terms: Terms) -> list[Message]:
    """Return all_reduces that send the sums of all owners' shards to every rank of their group.

    A message is closed once it exceeds the capacity.
    """
    by_group: dict[int | None, list[int]] = {}
    for shard in shards:
        by_group.setdefault(shard.ep_size, []).append(shard.numel)
    return [
        Message(Op.ALL_REDUCE, numel, ep_size=ep_size)
        for ep_size, sizes in by_group.items()
        for numel in runs_past(sizes, terms.capacity)
    ]


def reduce_to_owner(shards: Shards, terms: Terms) -> list[Message]:
    """Return reduces that send the sums of each owner's shards to the owner, in the order of the first shards."""
    by_owner: dict[tuple[int, int | None], list[int]] = {}
    for shard in shards:
        by_owner.setdefault((shard.owner, shard.ep_size), []).append(shard.numel)
    return [
        Message(Op.REDUCE, numel, ep_size=ep_size)
        for (_, ep_size), sizes in by_owner.items()
        for numel in runs_past(sizes, terms.capacity)
    ]


def reduce_scatter(shards: Shards, terms: Terms) -> list[Message]:
    """Return one message per group that sends one row to each owner.

    An all_to_all can have rows of any length. The rows of a reduce_scatter are padded to the longest row if this adds
    no more than a sixteenth. Otherwise they are sent unpadded, as a list of tensors.
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
    """The rules for one value of ``zero_optimization.gradient_reduction``.

    Attributes:
        op: The operation that the value names.
        sent: The messages that a runtime sends for the value, as the end of a sentence.
        stages: The ZeRO stages at which zero_runtime accepts the value.
        messages: A function that returns the messages of one bucket, which is given as shards.
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
