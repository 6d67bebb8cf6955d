"""The number of ranks along each axis of the grid, from ``communication.topology`` and the hosts. Pure.

Sizes are listed like a tensor's shape: the first axis is the outermost, whose neighbors are farthest apart in rank numbers,
and the last axis the innermost. Consecutive ranks are on one host, so slow links belong to the first axes.
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
        notice: why there are fewer axes than requested; empty otherwise.
    """

    sizes: tuple[int, ...]
    notice: str = ""


def grid(topology: Topology, hosts: Sequence[int]) -> Sizes:
    """The axes of ``topology``, with rank r on host ``hosts[r]``.

    Args:
        topology: number of axes 1, 2 or 3; ``auto``: two axes if there are several hosts with the same number of ranks; or
            the sizes themselves, whose product is the number of ranks.
        hosts: any number for each rank, equal for ranks of one host.
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
    """The number of ranks on each host, if it is the same and they are consecutive; None otherwise."""
    runs = [len(list(run)) for _, run in groupby(hosts)]
    if len(runs) != len(set(hosts)) or len(set(runs)) != 1:
        return None
    return runs[0]


def sharing(sizes: Sequence[int], hosts: Sequence[int]) -> tuple[int, ...]:
    """For each axis, the largest number of its groups with ranks on one host, which share that host's links."""
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
    """The ranks of each group along ``axis``: those that differ only in that coordinate."""
    stride = prod(sizes[axis + 1 :])
    span = stride * sizes[axis]
    return [
        tuple(first + offset + stride * step for step in range(sizes[axis]))
        for first in range(0, prod(sizes), span)
        for offset in range(stride)
    ]


def _cut(world: int, axes: int, inside: int | None) -> tuple[int, ...] | None:
    """``world`` as a product of ``axes`` factors above 1: along the hosts if possible, else as equal as possible."""
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
