"""The groups of ranks for experts, for each ``ep_size``.

With n ranks and ep_size e, the experts of a layer are divided over e expert-parallel ranks, which exchange
tokens. The n/e ranks with the same experts are expert-data-parallel, and sum the gradients of these experts.
For n = 4 and e = 2::

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
    """The groups of this process for one ``ep_size``.

    Attributes:
        parallel: The ranks that exchange tokens. Each of them has different experts.
        data: The ranks with the same experts.
    """

    parallel: DataParallelGroup
    data: DataParallelGroup


class RankSets(NamedTuple):
    """The groups of all ranks for one ``ep_size``. Each group is a tuple of global ranks in order.

    Attributes:
        parallel: The expert-parallel groups.
        data: The expert-data-parallel groups.
    """

    parallel: tuple[tuple[int, ...], ...]
    data: tuple[tuple[int, ...], ...]


def group_name(ep_size: int) -> str:
    """Return the name of the groups of ``ep_size``, which scripts and optimizers use, as in DeepSpeed."""
    return f"ep_size_{ep_size}"


def rank_sets(ranks: int, ep_size: int, data_first: bool = False) -> RankSets:
    """Return the groups of ``ranks`` ranks.

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
    """Create the groups of each ``ep_size``, and return them by their names (:func:`group_name`).

    All ranks must call this function.

    Args:
        sizes: The values of ep_size in the model, in the order of the model.
        data_first: The value of ``use_data_before_expert_parallelism``.
        observed: A function that wraps a process group of torch.

    Raises:
        ConfigError: A size does not divide the number of ranks.
    """
    rank, ranks = comm.get_rank(), comm.get_world_size()
    sets = {size: rank_sets(ranks, size, data_first) for size in dict.fromkeys(sizes)}
    groups = {}
    for size, (parallel, data) in sets.items():
        # Every rank must create every group, in the same order.
        own_data = _own(data, rank, f"{group_name(size)}_data")
        own_parallel = _own(parallel, rank, group_name(size))
        groups[group_name(size)] = ExpertRanks(observed(own_parallel), observed(own_data))
    return groups


def _own(sets: Iterable[tuple[int, ...]], rank: int, name: str) -> ProcessGroup:
    made = [(ranks, comm.new_group(ranks, name)) for ranks in sets]
    return next(group for ranks, group in made if rank in ranks)
