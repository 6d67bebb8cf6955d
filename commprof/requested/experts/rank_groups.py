"""The process groups of expert parallelism.

``ep_size`` ranks form an expert-parallel group, which has one copy of all experts of a layer. All ranks with the same
experts form an expert-data group, which sums the gradients of these experts. Source: DeepSpeed 0.19.8,
``utils/groups.py``, ``_create_expert_and_data_parallel``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from commprof.requested.errors import RequestedError
from commprof.requested.expectation import Expectation

Groups = tuple[tuple[int, ...], ...]


class RankGroups(NamedTuple):
    """Divides the ranks of a job into the groups of expert parallelism.

    Attributes:
        world_size: The number of all ranks.
        data_first: Whether ranks with the same experts are neighbors (``use_data_before_expert_parallelism``).

    >>> RankGroups(4).of_experts(2), RankGroups(4).of_replicas(2)
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """

    world_size: int
    data_first: bool = False

    def replicas(self, ep_size: int | None) -> int:
        """Return the number of ranks with the same parameters.

        This is the size of an expert-data group, or the number of all ranks for dense parameters (``None``).
        """
        return self.world_size // (ep_size or 1)

    def of_experts(self, ep_size: int) -> Groups:
        """Return the ranks of each expert-parallel group."""
        replicas = self.replicas(ep_size)
        if self.data_first:
            return tuple(tuple(range(first, self.world_size, replicas)) for first in range(replicas))
        return _neighbors(self.world_size, ep_size)

    def of_replicas(self, ep_size: int) -> Groups:
        """Return the ranks of each expert-data group."""
        if self.data_first:
            return _neighbors(self.world_size, self.replicas(ep_size))
        return tuple(tuple(range(first, self.world_size, ep_size)) for first in range(ep_size))

    def among_replicas(self, row: Expectation, ep_size: int | None) -> Expectation:
        """Return ``row`` with the groups that reduce and gather the parameters with ``ep_size``."""
        return (
            row
            if self.replicas(ep_size) == self.world_size
            else row._replace(groups=self.of_replicas(ep_size or 1))
        )

    def check(self, ep_sizes: Iterable[int | None]) -> None:
        """Raise RequestedError unless each of ``ep_sizes`` divides the number of ranks."""
        for ep_size in ep_sizes:
            if ep_size is not None and (ep_size < 1 or self.world_size % ep_size):
                raise RequestedError(
                    f"ep_size is {ep_size} on {self.world_size} ranks; expected a size that divides the ranks"
                )


def _neighbors(world_size: int, size: int) -> Groups:
    return tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))
