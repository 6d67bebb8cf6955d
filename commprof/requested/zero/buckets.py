"""Which gradients travel together, and to whom the parts of a bucket belong."""

from __future__ import annotations

from collections.abc import Iterable

from commprof.requested.parameters import Parameter
from commprof.requested.zero.partition import Layout, OwnedSlice

Bucket = list[Parameter]


def buckets_within(parameters: Iterable[Parameter], capacity: int) -> list[Bucket]:
    """The buckets of stages 1 and 2: one is sent before the gradient that would take it past ``capacity`` elements.

    So a bucket holds at most ``capacity`` elements, but for a parameter larger than that, which travels alone.
    Parameters without elements are in no bucket.
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


def runs_past(sizes: Iterable[int], capacity: int) -> list[int]:
    """Sums of consecutive ``sizes``, a sum being closed as soon as it is larger than ``capacity``."""
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


def owned_slices(bucket: Bucket, layout: Layout) -> list[OwnedSlice]:
    """The elements of ``bucket`` by owner, in bucket order; neighbours with the same owner are one slice."""
    merged: list[OwnedSlice] = []
    for parameter in bucket:
        for piece in layout.slices(parameter):
            if merged and merged[-1].owner == piece.owner:
                merged[-1] = OwnedSlice(piece.owner, merged[-1].numel + piece.numel)
            else:
                merged.append(OwnedSlice(piece.owner, piece.numel))
    return merged
