"""Installation of composed collectives and of the watch for slow ranks, as the block ``communication`` configures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from zero_runtime import comm, log
from zero_runtime.comm import DataParallelGroup
from zero_runtime.configuration.blocks.communication_block import CommunicationConfig, wrong_number_of_files
from zero_runtime.errors import ConfigError
from zero_runtime.experimental.topology_aware.axis_grid import Grid, hosts_of, make_grid
from zero_runtime.experimental.topology_aware.composition_choice import Choice, agreed_costs
from zero_runtime.experimental.topology_aware.costs import Costs
from zero_runtime.experimental.topology_aware.group import ComposedMessages
from zero_runtime.experimental.topology_aware.sizes import grid, sharing
from zero_runtime.experimental.topology_aware.watch import Spent, Watch
from zero_runtime.gradient_reduction.reduction import default_implementation


class Installed(NamedTuple):
    """The watch for slow ranks, and the costs that choose composed collectives; None for those not configured."""

    watch: Watch | None = None
    costs: Costs | None = None


def install(
    group: DataParallelGroup,
    communication: CommunicationConfig,
    implementation: str | None,
    wrap: Callable[[Any], DataParallelGroup],
) -> Installed:
    """Install composed collectives and the watch for slow ranks in ``group``, as configured.

    Args:
        group: all ranks.
        communication: the block.
        implementation: of a reduce_scatter: ``native``, ``all_to_all``, or None for the backend's.
        wrap: makes a group like ``group`` of the ranks along an axis.

    Raises:
        ConfigError: on every rank, if a calibration cannot be read or an axis has none.
    """
    if not communication.plain and group.world_size < comm.get_world_size():
        raise ConfigError(
            f"communication.topology is {communication.topology}, and the {comm.get_world_size()} ranks are divided into "
            f"groups of {group.world_size} that hold the same parameters; expected 1 (plain collectives) with tensor, "
            "sequence or pipeline parallelism"
        )
    axes_grid: Grid | None = None
    choice = costs = None
    chosen = implementation or default_implementation(group.backend)
    if not communication.plain:
        hosts = hosts_of(group)
        sizes, notice = grid(communication.topology, hosts)
        if notice and group.rank == 0:
            log.warning(notice)
        if len(sizes) > 1:
            if communication.world_calibration is not None:
                files = communication.axis_calibrations
                if len(files) != len(sizes):
                    raise ConfigError(wrong_number_of_files(len(files), len(sizes)))
                costs = agreed_costs(group, communication.world_calibration, files, sharing(sizes, hosts))
            choice = Choice(sizes, chosen, costs)
            axes_grid = make_grid(group, sizes, wrap)
    tolerance = communication.slow_node_tolerance
    watch = None
    if tolerance is not None:
        groups = (group, *(axes_grid.groups if axes_grid is not None else ()))
        world, *axes = times = [Spent() for _ in groups]
        for each, spent in zip(groups, times, strict=True):
            each.observe(spent)
        watch = Watch(group, tolerance, world, axes, axes_grid.sizes if axes_grid is not None else ())
    if axes_grid is not None and choice is not None:
        group.observe(ComposedMessages(axes_grid, choice, chosen))
    return Installed(watch, costs if axes_grid is not None else None)
