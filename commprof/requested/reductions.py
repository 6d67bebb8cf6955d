"""The gradient reductions: what becomes of one bucket of ``n`` elements among ``p`` ranks.

========================= =========================================================== ==========================
reduction                 messages                                                    bytes sent per rank
========================= =========================================================== ==========================
``all_reduce``            one all_reduce of the bucket                                2(p-1)/p n
``multi_rank_all_reduce`` one all_reduce of the owners' slices, more when the bucket  2(p-1)/p n
                          is one parameter larger than the bucket size
``reduce_to_owner``       one reduce for each rank that owns a part                   (p-1)/p n
``reduce_scatter``        one reduce_scatter with a row for each owner, or an         (p-1)/p n
                          all_to_all of the rows, which the owners add up
========================= =========================================================== ==========================

The first three are DeepSpeed's; the fourth is zero_runtime's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from commprof.requested.buckets import Bucket, owned_slices, runs_past
from commprof.requested.partition import Layout
from commprof.schema import Op


class Message(NamedTuple):
    """One collective that carries gradients.

    Attributes:
        op: what is issued.
        numel: elements behind ``payload_bytes``.
    """

    op: Op
    numel: int


Reduction = Callable[[Bucket, Layout, int], list[Message]]


def all_reduce(bucket: Bucket, layout: Layout, capacity: int) -> list[Message]:
    """The whole bucket to every rank."""
    return [Message(Op.ALL_REDUCE, sum(parameter.numel for parameter in bucket))]


def multi_rank_all_reduce(bucket: Bucket, layout: Layout, capacity: int) -> list[Message]:
    """The slices of all owners to every rank; a message is closed once it has more than ``capacity`` elements."""
    sizes = [piece.numel for piece in owned_slices(bucket, layout)]
    return [Message(Op.ALL_REDUCE, numel) for numel in runs_past(sizes, capacity)]


def reduce_to_owner(bucket: Bucket, layout: Layout, capacity: int) -> list[Message]:
    """The slices of each owner to that owner, owners in the order of their first slice."""
    by_owner: dict[int, list[int]] = {}
    for owner, numel in owned_slices(bucket, layout):
        by_owner.setdefault(owner, []).append(numel)
    return [Message(Op.REDUCE, numel) for sizes in by_owner.values() for numel in runs_past(sizes, capacity)]


def reduce_scatter(bucket: Bucket, layout: Layout, capacity: int) -> list[Message]:
    """One row for each rank with the elements that it owns; rows differ in length, and there is no padding."""
    return [Message(Op.REDUCE_SCATTER, sum(parameter.numel for parameter in bucket))]


REDUCTIONS: Final[dict[str, Reduction]] = {
    "all_reduce": all_reduce,
    "multi_rank_all_reduce": multi_rank_all_reduce,
    "reduce_to_owner": reduce_to_owner,
    "reduce_scatter": reduce_scatter,
}
