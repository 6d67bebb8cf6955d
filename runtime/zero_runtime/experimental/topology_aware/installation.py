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
    """The parts that were installed. A part that is not configured is None.

    Attributes:
        watch: The watch for slow ranks.
        costs: The costs by which composed collectives are chosen.
    """

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
        group: The group of all ranks.
        communication: The block ``communication`` of the configuration.
        implementation: The implementation of a reduce_scatter: ``native``, ``all_to_all``, or None for the
            default of the backend.
        wrap: A function that makes a group like ``group`` from the process group of an axis.

    Raises:
        ConfigError: A calibration cannot be read, an axis has no calibration, or only a part of the ranks has
            the same parameters. The error is raised on every rank.
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
