"""Which gradients travel together, and to whom the parts of a bucket belong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from commprof.requested.parameters import Parameter
from commprof.requested.partition import FlatGroup, Layout, OwnedSlice

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
        for owner, numel in layout.slices(parameter):
            if merged and merged[-1].owner == owner:
                merged[-1] = OwnedSlice(owner, merged[-1].numel + numel)
            else:
                merged.append(OwnedSlice(owner, numel))
    return merged


def balanced_rounds(group: FlatGroup, capacity: int) -> Iterator[list[OwnedSlice]]:
    """Buckets of at most ``capacity`` elements that hold as much of each owner's piece of ``group``.

    This is how zero_runtime fills a reduce_scatter when all gradients are there before the first bucket. Round k holds
    elements [k w, (k + 1) w) of each piece, w being capacity // ranks; padding does not travel.
    """
    piece = group.partition_numel
    width = max(1, capacity // group.world_size)
    for begin in range(0, piece, width):
        end = min(begin + width, piece)
        rows = [
            OwnedSlice(owner, group.occupied(owner * piece + begin, owner * piece + end))
            for owner in range(group.world_size)
        ]
        if any(row.numel for row in rows):
            yield [row for row in rows if row.numel]
