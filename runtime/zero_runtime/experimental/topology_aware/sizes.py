"""How many ranks each axis of the grid has: ``communication.topology``, for a given world. Pure.

Sizes are listed as a tensor's shape is: the first axis is the outermost, whose neighbours are farthest apart in rank
numbers, and the last one the innermost. Ranks that follow one another are on one host: slow links belong to the first axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import isqrt, prod
from typing import NamedTuple

Topology = int | str | tuple[int, ...]


class Sizes(NamedTuple):
    """The sizes of the axes, all above 1 unless there is one axis.

    Attributes:
        sizes: outermost first; a single one means plain collectives.
        notice: why there are fewer axes than were asked for; empty where there are not.
    """

    sizes: tuple[int, ...]
    notice: str = ""


def grid(topology: Topology, hosts: Sequence[int]) -> Sizes:
    """The axes of ``topology`` where rank r is on host ``hosts[r]``.

    Args:
        topology: number of axes 1, 2 or 3; ``auto``: two axes where the ranks are on several hosts, as many on each; or
            the sizes themselves, whose product is the number of ranks.
        hosts: any number for each rank, the same for ranks of one host.
    """
    world = len(hosts)
    inside = ranks_per_host(hosts)
    if isinstance(topology, tuple):
        return Sizes(tuple(size for size in topology if size > 1) or (1,))
    if topology == 1 or world == 1:
        return Sizes((world,))
    if topology == "auto":
        if inside is not None and 1 < inside < world:
            return Sizes((world // inside, inside))
        return Sizes(
            (world,), f"communication.topology auto: {_why(hosts, inside)}, so that collectives are plain"
        )
    assert isinstance(topology, int)
    for wanted in range(topology, 1, -1):
        sizes = _cut(world, wanted, inside)
        if sizes is not None:
            break
    else:
        sizes = (world,)
    if len(sizes) == topology:
        return Sizes(sizes)
    shown = "plain" if len(sizes) == 1 else f"made along axes of {' x '.join(map(str, sizes))}"
    return Sizes(
        sizes,
        f"communication.topology {topology}: {world} ranks do not make a grid of {topology} axes, so that collectives are "
        f"{shown}",
    )


def ranks_per_host(hosts: Sequence[int]) -> int | None:
    """How many ranks each host has, where each has as many, one after the other; None otherwise."""
    runs = [len(list(run)) for _, run in groupby(hosts)]
    if len(runs) != len(set(hosts)) or len(set(runs)) != 1:
        return None
    return runs[0]


def sharing(sizes: Sequence[int], hosts: Sequence[int]) -> tuple[int, ...]:
    """For each axis, how many of its groups at most have ranks on one and the same host: they share that host's links."""
    sharers = []
    for axis in range(len(sizes)):
        groups = axis_groups(sizes, axis)
        of = {rank: number for number, group in enumerate(groups) for rank in group}
        on: dict[int, set[int]] = {}
        for rank, host in enumerate(hosts):
            on.setdefault(host, set()).add(of[rank])
        sharers.append(max(map(len, on.values())))
    return tuple(sharers)


def axis_groups(sizes: Sequence[int], axis: int) -> list[tuple[int, ...]]:
    """The ranks of each group along ``axis``: those that differ in that coordinate alone."""
    stride = prod(sizes[axis + 1 :])
    span = stride * sizes[axis]
    return [
        tuple(first + offset + stride * step for step in range(sizes[axis]))
        for first in range(0, prod(sizes), span)
        for offset in range(stride)
    ]


def _cut(world: int, axes: int, inside: int | None) -> tuple[int, ...] | None:
    """``world`` as a product of ``axes`` factors above 1: along the hosts where that can be, else as equal as may be."""
    if axes == 1:
        return (world,) if world > 1 else None
    if inside is not None and 1 < inside < world:
        outer = _cut(world // inside, axes - 1, None)
        if outer is not None:
            return (*outer, inside)
        inner = _cut(inside, axes - 1, None)
        if inner is not None:
            return (world // inside, *inner)
        return None
    best: tuple[int, ...] | None = None
    for factor in range(2, isqrt(world) + 1):
        if world % factor:
            continue
        rest = _cut(world // factor, axes - 1, None)
        if rest is not None:
            candidate = tuple(sorted((factor, *rest)))
            if best is None or max(candidate) < max(best):
                best = candidate
    return best


def _why(hosts: Sequence[int], inside: int | None) -> str:
    if len(set(hosts)) == 1:
        return f"all {len(hosts)} ranks are on one host"
    if inside == 1:
        return f"each of the {len(hosts)} hosts has one rank"
    return f"the {len(set(hosts))} hosts do not have as many ranks each, one after the other"
