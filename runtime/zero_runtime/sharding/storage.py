"""Where the slices of a model are kept while nobody uses them: on the device, on the host, or in files (stage 3)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zero_runtime import log
from zero_runtime.offload.allocation import give_back_freed_memory
from zero_runtime.sharding.pages import Pager
from zero_runtime.sharding.place import Place
from zero_runtime.sharding.policy import SliceOffload
from zero_runtime.sharding.shards import Shard
from zero_runtime.startup.huge_pages import huge_pages_in_use


class SliceStorage:
    """Keeps slices where ``offload_param`` says.

    Args:
        offload: that block.
        device: where the parameters are used.
        rank: of this process.

    Attributes:
        place: of slices in memory.
        pager: what keeps slices in files; None where none are kept there.
    """

    def __init__(self, offload: SliceOffload, device: torch.device, rank: int) -> None:
        self._offload = offload
        self._rank = rank
        if device.type == "cpu" and huge_pages_in_use():
            # Whole parameters come and go in host memory. With pages of 4 KiB this would cost more time than it is worth.
            give_back_freed_memory()
        on_host = offload.device != "none"
        pinned = on_host and offload.pinned and device.type == "cuda"
        self.place = Place(torch.device("cpu") if on_host else None, pinned)
        self.pager = Pager(offload, rank, pinned) if offload.device == "nvme" else None

    def keep(self, shard: Shard) -> None:
        """Put a slice where it belongs. One that is in files already, by the same settings, stays there."""
        pager = shard.pager
        mine = self.pager
        if pager is not None and mine is not None and not mine.in_files and pager.offload == mine.offload:
            self.pager = pager  # of zero.Init, with which the model was made
        if pager is not None and (pager is not self.pager or shard.persistent):
            shard.page_in()
        if self.pager is not None:
            self.pager.adopt(shard)

    def report(self, shards: Iterable[Shard]) -> None:
        """Say on stderr, on rank 0, that no slice of a model is in files, though that is what the configuration asks for."""
        if self.pager is None or self.pager.in_files or self._rank:
            return
        held = list(shards)
        persistent = sum(shard.slice_numel for shard in held if shard.persistent)
        fitting = sum(shard.slice_numel for shard in held) - persistent
        log.warning(
            f"offload_param nvme has put nothing into files: of each rank's slices {fitting} elements fit "
            f"max_in_cpu ({self._offload.max_in_cpu}), and {persistent} are of parameters that stay whole by "
            "stage3_param_persistence_threshold; lower the two to use less memory"
        )
