"""The settings of residency: when parameters are gathered and released, and where shards are stored (stage 3)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero_runtime import comm
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError
from zero_runtime.offload.tensor_files import AsynchronousIO
from zero_runtime.sharding.gather_schedule.gathered_blocks import MODULE


class SliceOffload(NamedTuple):
    """The storage of released shards, as configured by the block ``offload_param``. Sizes are elements.

    Attributes:
        device: ``none`` for the device of the parameters, ``cpu`` for host memory, ``nvme`` for files.
        nvme_path: The directory of the files.
        pinned: Whether the host memory is page-locked, if the parameters are on an accelerator.
        buffer_count: The number of buffers for pages that are being read or written.
        buffer_size: The number of elements of a buffer. A larger shard is stored in several files, and moved in
            parts.
        max_in_cpu: The number of elements of each rank that stay in host memory. The other elements are in
            files.
        io: How files are read and written.
    """

    device: str = "none"
    nvme_path: str | None = None
    pinned: bool = True
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    io: AsynchronousIO = AsynchronousIO()

    def effective(self) -> dict[str, object]:
        """Return the settings under the keys of a configuration."""
        return {
            "device": self.device,
            "nvme_path": self.nvme_path,
            "pin_memory": self.pinned,
            "buffer_count": self.buffer_count,
            "buffer_size": self.buffer_size,
            "max_in_cpu": self.max_in_cpu,
        }


class ResidencyPolicy(NamedTuple):
    """When parameters are gathered and released. Sizes are elements; the defaults are DeepSpeed's.

    Attributes:
        prefetch: The approximate limit of the number of elements that are prefetched; 0 for no prefetch.
        reuse_distance: Parameters that are used again within this many elements are kept.
        max_live: Parameters are prefetched only while fewer elements than this are gathered.
        persistence: Parameters of at most this many elements persist.
        model_persistence: The largest number of elements that persist in total.
        sequential: Whether there is one message for each parameter.
        by_all_reduce: Whether several parameters are gathered by an all_reduce of whole, padded buffers.
        secondary_size: The number of ranks of a secondary partition with larger shards (hpZ); 1 for none.
        leaf_classes, leaf_names, leaf_suffixes: The leaf modules, which are gathered with their submodules.
        granularity: modules of at most this many elements per layer are leaf modules; 0 for none.
        quantized: Whether parameters are gathered in 8 bits among all ranks. With ``quantized_frozen`` only
            frozen parameters are.
        report_trace: Whether to print a warning when modules run in a different order than recorded.
        unit: The unit that one message gathers: ``module``, ``block`` or ``auto``.
        offload: the storage of released shards.
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
    unit: str = MODULE
    quantized: bool = False
    quantized_frozen: bool = False
    offload: SliceOffload = SliceOffload()

    def quantizes(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether ``parameter`` is gathered in 8 bits."""
        return self.quantized or (self.quantized_frozen and not parameter.requires_grad)


def secondary_group(group: DataParallelGroup, size: int) -> DataParallelGroup | None:
    """Return the group of ``size`` consecutive ranks that contains this rank. Every rank must call this function."""
    if size <= 1:
        return None
    if group.world_size % size:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {size}, which does not divide the {group.world_size} ranks; "
            "choose a number that does, such as the ranks of a host, or 1 for none"
        )
    own_group = None
    for first in range(0, group.world_size, size):
        ranks = comm.new_group(group.global_ranks[first : first + size], f"secondary partition of {size}")
        if first <= group.rank < first + size:
            own_group = DataParallelGroup(ranks)
    return own_group


def gather_group(group: DataParallelGroup) -> DataParallelGroup:
    """Return the ranks of ``group`` as an additional group with the same observers.

    Every rank must call this function.
    """
    own = DataParallelGroup(comm.new_group(group.global_ranks, "parameter gathering"))
    for observer in group.observers:
        own.observe(observer)
    return own
