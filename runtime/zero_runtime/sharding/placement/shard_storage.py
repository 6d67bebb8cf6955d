"""Storage of a model's released shards: on the device, in host memory or on NVMe (stage 3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from zero_runtime import log
from zero_runtime.offload.allocation import give_back_freed_memory, keep_freed_memory
from zero_runtime.sharding.gather_schedule.policy import SliceOffload
from zero_runtime.sharding.placement.pages import Pager
from zero_runtime.sharding.placement.place import Place
from zero_runtime.sharding.shards import Shard
from zero_runtime.startup.huge_pages import huge_pages_in_use

# Bytes. Gradients of a few MiB rarely begin at a huge page. Each costs a thousand page faults if its memory returns to
# the system. Larger gradients cost few page faults for their size, and hundreds of MiB would stay allocated if their
# memory were kept.
_SMALL: Final = 8 << 20


class SliceStorage:
    """Stores shards as ``offload_param`` configures.

    Args:
        offload: The block ``offload_param``.
        device: The device of the gathered parameters.
        rank: The rank of this process.
        by_block: Whether parameters are gathered block by block.

    Attributes:
        place: the memory of shards.
        pager: The object that stores shards in files; None without NVMe.
    """

    def __init__(
        self, offload: SliceOffload, device: torch.device, rank: int, by_block: bool = False
    ) -> None:
        self._offload = offload
        self._rank = rank
        on_host = offload.device != "none"
        if device.type == "cpu":
            if by_block and not on_host:
                keep_freed_memory(_SMALL)
            elif huge_pages_in_use():
                # Gathered parameters are allocated and freed frequently. With pages of 4 KiB this takes too long.
                give_back_freed_memory()
        pinned = on_host and offload.pinned and device.type == "cuda"
        self.place = Place(torch.device("cpu") if on_host else None, pinned)
        self.pager = Pager(offload, rank, pinned) if offload.device == "nvme" else None

    def keep(self, shard: Shard) -> None:
        """Store a shard. A shard that is already in files with the same settings stays there."""
        pager = shard.pager
        mine = self.pager
        if pager is not None and mine is not None and not mine.in_files and pager.offload == mine.offload:
            self.pager = pager  # the pager of zero.Init, in which the model was constructed
        if pager is not None and (pager is not self.pager or shard.persistent):
            shard.page_in()
        if self.pager is not None:
            self.pager.adopt(shard)

    def report(self, shards: Iterable[Shard]) -> None:
        """Warn on rank 0 if no shard of a model is in files although the configuration requests NVMe."""
        if self.pager is None or self.pager.in_files or self._rank:
            return
        all_shards = list(shards)
        persistent = sum(shard.slice_numel for shard in all_shards if shard.persistent)
        fitting = sum(shard.slice_numel for shard in all_shards) - persistent
        log.warning(
            f"offload_param nvme has put nothing into files: of each rank's shards, {fitting} elements fit "
            f"in max_in_cpu ({self._offload.max_in_cpu}), and {persistent} belong to parameters that persist "
            "(stage3_param_persistence_threshold); lower these two keys to use less memory"
        )
