"""The groups of ranks of experts, for each ``ep_size``.

With n ranks and ep_size e, the experts of a layer are divided over e expert-parallel ranks, which exchange tokens. The n/e
ranks with the same experts are expert-data-parallel: they sum the gradients of these experts. For n = 4 and e = 2::

                                 expert-parallel     expert-data-parallel
    default                      {0, 1} {2, 3}       {0, 2} {1, 3}
    data before experts          {0, 2} {1, 3}       {0, 1} {2, 3}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from zero_runtime import comm
from zero_runtime.comm import DataParallelGroup, ProcessGroup
from zero_runtime.errors import ConfigError


class ExpertRanks(NamedTuple):
    """This process's groups for one ``ep_size``.

    Attributes:
        parallel: the ranks that exchange tokens; each has different experts.
        data: the ranks with the same experts.
    """

    parallel: DataParallelGroup
    data: DataParallelGroup


class RankSets(NamedTuple):
    """The groups of all ranks for one ``ep_size``: global ranks, in the order of a group."""

    parallel: tuple[tuple[int, ...], ...]
    data: tuple[tuple[int, ...], ...]


def group_name(ep_size: int) -> str:
    """The name under which scripts and optimizers know the groups of ``ep_size``; DeepSpeed's."""
    return f"ep_size_{ep_size}"


def rank_sets(ranks: int, ep_size: int, data_first: bool = False) -> RankSets:
    """The groups of ``ranks`` ranks.

    >>> rank_sets(4, 2)
    RankSets(parallel=((0, 1), (2, 3)), data=((0, 2), (1, 3)))

    Raises:
        ConfigError: ``ep_size`` does not divide ``ranks``.
    """
    if ep_size < 1 or ranks % ep_size:
        raise ConfigError(
            f"ep_size is {ep_size}, and there are {ranks} data-parallel ranks; expected a divisor of {ranks}, so that each "
            "group of expert-parallel ranks is complete"
        )
    width = ranks // ep_size
    apart = tuple(tuple(range(first, ranks, ep_size)) for first in range(ep_size))
    adjacent = tuple(tuple(range(first, first + ep_size)) for first in range(0, ranks, ep_size))
    if not data_first:
        return RankSets(adjacent, apart)
    return RankSets(
        tuple(tuple(range(first, ranks, width)) for first in range(width)),
        tuple(tuple(range(first, first + width)) for first in range(0, ranks, width)),
    )


def create(
    sizes: Iterable[int], data_first: bool, observed: Callable[[ProcessGroup], DataParallelGroup]
) -> dict[str, ExpertRanks]:
    """Create the groups of each ``ep_size``, by :func:`group_name`. All ranks must call it.

    Args:
        sizes: the values of ep_size in the model, in its order.
        data_first: ``use_data_before_expert_parallelism``.
        observed: wraps torch's group.

    Raises:
        ConfigError: a size does not divide the number of ranks.
    """
    rank, ranks = comm.get_rank(), comm.get_world_size()
    sets = {size: rank_sets(ranks, size, data_first) for size in dict.fromkeys(sizes)}
    groups = {}
    for size, (parallel, data) in sets.items():
        # Every rank creates every group, in one order.
        own_data = _own(data, rank, f"{group_name(size)}_data")
        own_parallel = _own(parallel, rank, group_name(size))
        groups[group_name(size)] = ExpertRanks(observed(own_parallel), observed(own_data))
    return groups


def _own(sets: Iterable[tuple[int, ...]], rank: int, name: str) -> ProcessGroup:
    made = [(ranks, comm.new_group(ranks, name)) for ranks in sets]
    return next(group for ranks, group in made if rank in ranks)
