"""The process groups along the axes of a grid, which are created once for each grid."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from commprof import hooks
from zero_runtime import comm
from zero_runtime.comm import DataParallelGroup
from zero_runtime.experimental.topology_aware.sizes import axis_groups

_HOSTS: Final = hooks.tag("other")
# New groups cost memory and, on an accelerator, connections. So a second engine reuses the groups of the first
# engine.
_made: Final[WeakKeyDictionary[Any, dict[tuple[int, ...], tuple[Any, ...]]]] = WeakKeyDictionary()


class Grid(NamedTuple):
    """The axes of a grid, and the groups of this rank.

    Attributes:
        sizes: The number of ranks along each axis, outermost axis first.
        groups: This rank's group along each axis.
    """

    sizes: tuple[int, ...]
    groups: tuple[DataParallelGroup, ...]


def hosts_of(group: DataParallelGroup) -> list[int]:
    """Return, for each rank, a number that identifies its host.

    The numbers are checksums of the host names, which the ranks exchange with one all_gather.
    """
    mine = torch.tensor([zlib.crc32(socket.gethostname().encode())], dtype=torch.int64, device=group.device)
    everybody = mine.new_zeros(group.world_size)
    group.all_gather_single(everybody, mine, why=_HOSTS)
    return [int(each) for each in everybody.tolist()]


def make_grid(
    group: DataParallelGroup, sizes: Sequence[int], wrap: Callable[[Any], DataParallelGroup]
) -> Grid:
    """Return the groups along each axis of ``sizes``. Every rank must call this function.

    The description of a group is ``axis <number> of <sizes>``, where axis 0 is the outermost axis. Traces
    contain this description.

    Args:
        group: The group of all ranks.
        sizes: The number of ranks along each axis. The product of the sizes is the number of all ranks.
        wrap: A function that makes a group from the result of :func:`zero_runtime.comm.new_group`.
    """
    sizes = tuple(sizes)
    by_sizes = _made.setdefault(comm.default_group(), {})
    if sizes not in by_sizes:
        shown = "x".join(map(str, sizes))
        mine = []
        for axis in range(len(sizes)):
            for ranks in axis_groups(sizes, axis):
                axis_group = comm.new_group(
                    [group.global_ranks[rank] for rank in ranks], f"axis {axis} of {shown}"
                )
                if group.rank in ranks:
                    mine.append(axis_group)
        by_sizes[sizes] = tuple(mine)
    return Grid(sizes, tuple(wrap(each) for each in by_sizes[sizes]))
