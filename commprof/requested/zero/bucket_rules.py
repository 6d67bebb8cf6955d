"""Determines which gradients are reduced together, and which rank owns which part of a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from commprof.requested.parameters import Parameter
from commprof.requested.zero.partition import Layout, OwnedShard

Bucket = list[Parameter]


def buckets_within(parameters: Iterable[Parameter], capacity: int) -> list[Bucket]:
    """Return ``parameters`` in buckets of at most ``capacity`` elements, by the rule of stages 1 and 2.

    A bucket is sent before the gradient that would exceed ``capacity``. A parameter that is larger than ``capacity``
    has a bucket of its own. Parameters without elements are in no bucket.
    """
    buckets: list[Bucket] = []
    numel = 0
    for parameter in parameters:
        if parameter.numel == 0:
            continue
        if not buckets or numel + parameter.numel > capacity:
            buckets.append([])
            numel = 0
        buckets[-1].append(parameter)
        numel += parameter.numel
    return buckets


def arrived_for_buckets(buckets: Sequence[Bucket], in_backward_order: bool) -> list[int]:
    """Return how many gradients have arrived when each of ``buckets`` is sent.

    A bucket is sent when the gradient that would exceed it arrives. The last bucket is sent at the end of the backward
    pass. If gradients do not enter buckets as they arrive, all buckets are sent at the end.

    >>> a, b, c = (Parameter(name, 4) for name in "abc")
    >>> arrived_for_buckets([[a, b], [c]], True)
    [3, 3]
    """
    total = sum(map(len, buckets))
    if not in_backward_order:
        return [total] * len(buckets)
    return [min(total, end + 1) for end in accumulate(map(len, buckets))]


def runs_past(sizes: Iterable[int], capacity: int) -> list[int]:
    """Return sums of consecutive ``sizes``. A sum is closed as soon as it is larger than ``capacity``."""
    sums: list[int] = []
    open_sum = 0
    for size in sizes:
        open_sum += size
        if open_sum > capacity:
            sums.append(open_sum)
            open_sum = 0
    if open_sum:
        sums.append(open_sum)
    return sums


def owned_slices(bucket: Bucket, layout: Layout) -> list[OwnedShard]:
    """Return the shards of ``bucket`` in bucket order. Adjacent elements with one owner and group form one shard."""
    merged: list[OwnedShard] = []
    for parameter in bucket:
        for shard in layout.shards(parameter):
            last = merged[-1] if merged else None
            if last is not None and (last.owner, last.ep_size) == (shard.owner, shard.ep_size):
                merged[-1] = last._replace(numel=last.numel + shard.numel)
            else:
                merged.append(shard._replace(offset=0))
    return merged
