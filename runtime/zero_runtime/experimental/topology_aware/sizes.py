"""The number of ranks along each axis of the grid, computed from ``communication.topology`` and the hosts.

Sizes are listed like the shape of a tensor. The first axis is the outermost one, whose neighbors have the
largest difference in rank numbers. The last axis is the innermost one. Consecutive ranks are on one host, so
slow links belong to the first axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import isqrt, prod
from typing import NamedTuple

Topology = int | str | tuple[int, ...]


class Sizes(NamedTuple):
    """The sizes of the axes. All sizes are above 1, unless there is only one axis.

    Attributes:
        sizes: The sizes, outermost axis first. A single size means plain collectives.
        notice: The reason why there are fewer axes than requested, or an empty string.
    """

    sizes: tuple[int, ...]
    notice: str = ""


def grid(topology: Topology, hosts: Sequence[int]) -> Sizes:
    """Return the axes of ``topology``, with rank r on host ``hosts[r]``.

    Args:
        topology: The number of axes (1, 2 or 3), the sizes of the axes, or ``auto``. The product of the sizes
            must be the number of ranks. ``auto`` means two axes if there are several hosts with the same
            number of ranks.
        hosts: For each rank, a number that identifies its host.
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
    """Return the number of ranks on each host.

    The result is None if hosts have different numbers of ranks, or if the ranks of a host are not consecutive.
    """
    runs = [len(list(run)) for _, run in groupby(hosts)]
    if len(runs) != len(set(hosts)) or len(set(runs)) != 1:
        return None
    return runs[0]


def sharing(sizes: Sequence[int], hosts: Sequence[int]) -> tuple[int, ...]:
    """Return, for each axis, the largest number of its groups that have ranks on the same host.

    These groups share the links of the host.
    """
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
    """Return the ranks of each group along ``axis``.

    The ranks of a group differ only in their coordinate on this axis.
    """
    stride = prod(sizes[axis + 1 :])
    span = stride * sizes[axis]
    return [
        tuple(first + offset + stride * step for step in range(sizes[axis]))
        for first in range(0, prod(sizes), span)
        for offset in range(stride)
    ]


def _cut(world: int, axes: int, inside: int | None) -> tuple[int, ...] | None:
    """Return ``axes`` factors above 1 whose product is ``world``, or None if there are no such factors.

    One factor or a product of factors is the number of ranks per host (``inside``), if this number is known.
    Otherwise the factors are as equal as possible.
    """
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
    return f"the {len(set(hosts))} hosts do not have equal numbers of consecutive ranks"
