"""The choice between a plain and a composed collective for each message, equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError
from zero_runtime.experimental.topology_aware.costs import OPERATIONS, Cost, Costs, read_costs

_TELL: Final = hooks.tag("other")


class Choice:
    """The choice of plain or composed for each message. Without costs every message is composed.

    Args:
        sizes: The number of ranks along each axis.
        implementation: The implementation of a reduce_scatter.
        costs: The calibrated costs, or None without a calibration.
    """

    def __init__(self, sizes: Sequence[int], implementation: str, costs: Costs | None) -> None:
        self._sizes = tuple(sizes)
        self._implementation = implementation
        self._costs = costs
        self.composes = cache(self._composes)

    def _composes(self, operation: str, payload: int) -> bool:
        """Return whether ``operation`` (all_reduce, reduce_scatter, all_gather) of ``payload`` bytes is composed."""
        if self._costs is None:
            return payload > 0
        arguments = (operation, payload, self._sizes, self._implementation)
        return self._costs.composed_ns(*arguments) < self._costs.plain_ns(*arguments)


def agreed_costs(group: DataParallelGroup, world: str, axes: Sequence[str], sharing: Sequence[int]) -> Costs:
    """Return the costs in the calibration files of rank 0 on every rank, with one broadcast.

    Args:
        group: The group of all ranks.
        world: The path of the calibration among all ranks.
        axes: The paths of the calibrations among the ranks of each axis, outermost axis first.
        sharing: The number of groups that share a host's links, for each axis (see :class:`Costs`).

    Raises:
        ConfigError: Rank 0 cannot read one of the files. The error is raised on every rank.
    """
    files = [world, *axes]
    message = torch.zeros(1 + 2 * len(OPERATIONS) * len(files), dtype=torch.float64, device=group.device)
    failed: ConfigError | None = None
    if group.rank == 0:
        try:
            read = [read_costs(path) for path in files]
            numbers = [number for costs in read for each in OPERATIONS for number in costs[each]]
            message.copy_(torch.tensor([1.0, *numbers], dtype=torch.float64))
        except ConfigError as error:
            failed = error
    group.broadcast(message, 0, why=_TELL)
    if failed is not None:
        raise failed
    good, *numbers = message.tolist()
    if not good:
        raise ConfigError("communication.calibration: rank 0 cannot read the files; see its error")
    pairs = iter(zip(numbers[::2], numbers[1::2], strict=True))
    tables = [{each: Cost(*next(pairs)) for each in OPERATIONS} for _ in files]
    return Costs(tables[0], tables[1:], tuple(sharing))
