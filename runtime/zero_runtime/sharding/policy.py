"""The settings of residency: when sharded parameters are gathered and released, and where slices are kept (stage 3)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero_runtime import comm
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError, UnsupportedError


class ResidencyPolicy(NamedTuple):
    """When parameters are gathered and released. Sizes are elements; the defaults are DeepSpeed's.

    Attributes:
        prefetch: gather at most about this much ahead of its use; 0 for never.
        reuse_distance: keep what is used again within this many elements.
        max_live: gather ahead only while less than this is whole.
        persistence: parameters of at most this many elements stay whole.
        model_persistence: at most this many elements stay whole.
        sequential: one message for each parameter.
        by_all_reduce: gather several parameters by an all_reduce of their padded whole.
        secondary_size: ranks that share out a second, larger slice (hpZ); 1 for none.
        leaf_classes, leaf_names, leaf_suffixes: modules that are gathered as one, children included.
        granularity: modules of fewer elements per layer than this are gathered as one; 0 for none.
        report_trace: say on stderr when the recorded order of modules no longer holds.
        remote_device: where slices are kept; None for the parameters' device.
    """

    prefetch: int = 50_000_000
    reuse_distance: int = 1_000_000_000
    max_live: int = 1_000_000_000
    persistence: int = 100_000
    model_persistence: int = 2**63 - 1
    sequential: bool = False
    by_all_reduce: bool = False
    secondary_size: int = 1
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()
    granularity: int = 0
    report_trace: bool = False
    remote_device: str | None = None


def remote(device: str | None) -> torch.device | None:
    """Where slices are kept: None for the parameters' own device.

    Raises:
        UnsupportedError: for a device that holds files.
        ConfigError: for anything that is no device.
    """
    if device in (None, "none"):
        return None
    if device == "nvme":
        raise UnsupportedError("slices of parameters on nvme are not in this version yet; use cpu or none")
    try:
        return torch.device(str(device))
    except RuntimeError as error:
        raise ConfigError(f"{device!r} is no device to keep parameters on; expected cpu or none") from error


def secondary_group(group: DataParallelGroup, size: int) -> DataParallelGroup | None:
    """The group of this rank among groups of ``size`` consecutive ranks. Every rank must call it."""
    if size <= 1:
        return None
    if group.world_size % size:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {size}, which does not divide the {group.world_size} ranks"
        )
    found = None
    for first in range(0, group.world_size, size):
        made = comm.new_group(group.global_ranks[first : first + size])
        if first <= group.rank < first + size:
            found = DataParallelGroup(made)
    return found
