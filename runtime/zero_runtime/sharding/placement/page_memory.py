"""Pages of shards on NVMe, and the pool of their buffers (stage 3)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero_runtime.offload.file_ranges import aligned_empty


class Page(NamedTuple):
    """A range of elements of one shard.

    Attributes:
        number: The number of the shard.
        start: The first element.
        numel: The number of elements.
        dtype: The dtype of the shard.
    """

    number: int
    start: int
    numel: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name of the page's file."""
        return f"parameter-{self.number}.{self.start}"


class PageMemory:
    """A pool of buffers for pages.

    Buffers are reused, because most pages have the same size and repeated allocation fragments memory.

    Args:
        pinned: Whether buffers are page-locked.
    """

    def __init__(self, pinned: bool) -> None:
        self.spare_bytes = 0
        self._pinned = pinned
        self._spare: list[torch.Tensor] = []

    @torch.inference_mode(False)
    def take(self, page: Page, room: int) -> torch.Tensor:
        """Return a buffer for a page.

        If a buffer must be allocated, spare buffers are freed first until they take at most ``room`` elements.
        """
        size = page.numel * page.dtype.itemsize
        fitting = [each for each in self._spare if each.numel() == size]
        if fitting:
            self._remove(fitting[0])
            return fitting[0].view(page.dtype)
        while self._spare and self.spare_bytes > room * page.dtype.itemsize:
            self._remove(self._spare[0])
        return aligned_empty(size, self._pinned).view(page.dtype)

    def give_back(self, values: torch.Tensor) -> None:
        """Return the buffer of ``values`` to the pool."""
        spare = values.view(torch.uint8)
        self._spare.append(spare)
        self.spare_bytes += spare.numel()

    def _remove(self, spare: torch.Tensor) -> None:
        self._spare = [each for each in self._spare if each is not spare]
        self.spare_bytes -= spare.numel()
