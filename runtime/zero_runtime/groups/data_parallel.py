"""The data-parallel group, with collectives as configured: timed, logged, along axes."""

from __future__ import annotations

from typing import NamedTuple

from zero_runtime.comm import DataParallelGroup, ProcessGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.experimental.topology_aware.installation import Installed, install
from zero_runtime.groups.logged import log_messages
from zero_runtime.groups.timed import TimedGroup


class DataParallelRanks(NamedTuple):
    """The group, and what the block ``communication`` has installed in it."""

    group: DataParallelGroup
    installed: Installed


def data_parallel_ranks(config: RuntimeConfig, data: ProcessGroup | None = None) -> DataParallelRanks:
    """The ranks of ``data``; None for all. Every rank must call it: it may create groups and issue collectives."""
    group = TimedGroup(data) if config.wall_clock_breakdown else DataParallelGroup(data)

    def along_axis(handle: ProcessGroup) -> DataParallelGroup:
        axis_group = (
            TimedGroup(handle, group.clock) if isinstance(group, TimedGroup) else DataParallelGroup(handle)
        )
        if config.comms_logger.enabled:
            log_messages(axis_group)
        return axis_group

    if config.comms_logger.enabled:
        log_messages(group)
    installed = install(group, config.communication, config.zero.reduce_scatter_impl, along_axis)
    return DataParallelRanks(group, installed)
