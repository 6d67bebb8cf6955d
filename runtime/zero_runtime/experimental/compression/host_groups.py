"""The groups of hierarchical compression: the ranks of one host, and the ranks at one position on every host."""

from __future__ import annotations

import os
from typing import NamedTuple

from zero_runtime import comm, log
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError


class Hosts(NamedTuple):
    """The two groups of this rank.

    Attributes:
        inside: The ranks of this rank's host.
        across: The ranks at this rank's position on each host.
    """

    inside: DataParallelGroup
    across: DataParallelGroup


def hosts_of(group: DataParallelGroup) -> Hosts | None:
    """Return the groups within and across hosts, or None if all ranks are on one host. All ranks must call it.

    Each host has LOCAL_WORLD_SIZE consecutive ranks.

    Raises:
        ConfigError: The launcher has not set LOCAL_WORLD_SIZE, LOCAL_WORLD_SIZE does not divide the number of
            ranks, or only a part of the ranks has the same parameters.
    """
    variable = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not variable.isdigit() or int(variable) < 1:
        raise ConfigError(
            f"hierarchical_compress needs the number of ranks on each host, and LOCAL_WORLD_SIZE is {variable!r}; start the "
            "ranks by commprof run or torchrun, which set it, or set hierarchical_compress to false"
        )
    size, world = int(variable), group.world_size
    if world < comm.get_world_size():
        raise ConfigError(
            f"hierarchical_compress needs a training in which all ranks hold the whole model, and here {world} of "
            f"{comm.get_world_size()} hold the same parameters; set it to false, or leave tp_size, sequence_parallel_size "
            "and stages out"
        )
    if world % size:
        raise ConfigError(
            f"hierarchical_compress needs the same number of ranks on each host, and LOCAL_WORLD_SIZE is {size}, "
            f"which does not divide the {world} ranks; set hierarchical_compress to false"
        )
    if size == world:
        if group.rank == 0:
            log.warning(
                f"hierarchical_compress: all {world} ranks are on one host, so gradients are sent uncompressed"
            )
        return None
    first, place = group.rank // size * size, group.rank % size
    inside = [
        comm.new_group(group.global_ranks[start : start + size], "host") for start in range(0, world, size)
    ]
    across = [comm.new_group(group.global_ranks[start::size], "across hosts") for start in range(size)]
    return Hosts(DataParallelGroup(inside[first // size]), DataParallelGroup(across[place]))
