"""The data-parallel group and its configured observers: timing, logging and collectives along axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zero_runtime.comm import DataParallelGroup, ProcessGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.experimental.topology_aware.installation import Installed, install
from zero_runtime.groups.logged import MessageLogger
from zero_runtime.groups.timed import Timer
from zero_runtime.training.clock import Clock


class DataParallelRanks(NamedTuple):
    """The data-parallel group, the parts that the block ``communication`` installed in it, and a wrapper function.

    The function wraps other process groups of these ranks.
    """

    group: DataParallelGroup
    installed: Installed
    observed: Callable[[ProcessGroup], DataParallelGroup]


def data_parallel_ranks(config: RuntimeConfig, data: ProcessGroup | None = None) -> DataParallelRanks:
    """Return the data-parallel group of the ranks in ``data``; None for all ranks.

    Every rank must call this function, because it may create groups and issue collectives.

    The group has these observers, from the innermost to the outermost: the timer, the message logger, the
    counter of the slow-rank watch, and the composer, which replaces calls. Therefore composed calls are timed,
    logged and counted along the axes.
    """
    group = DataParallelGroup(data)
    clock = Clock(True, group.device) if config.wall_clock_breakdown else None

    def observed(each: DataParallelGroup) -> DataParallelGroup:
        if clock is not None:
            each.observe(Timer(clock))
        if config.comms_logger.enabled:
            each.observe(MessageLogger(each))
        return each

    def along_axis(handle: ProcessGroup) -> DataParallelGroup:
        return observed(DataParallelGroup(handle))

    installed = install(observed(group), config.communication, config.zero.reduce_scatter_impl, along_axis)
    return DataParallelRanks(group, installed, along_axis)
