"""The memory of released shards: device and page-locking (stage 3)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Place(NamedTuple):
    """The memory of shards.

    Attributes:
        device: The device of the shards; None for the device of the parameters.
        pinned: Whether the host memory is page-locked.
    """

    device: torch.device | None = None
    pinned: bool = False

    def zeros(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return zeros in this memory: ``numel`` elements of the dtype of the parameter ``like``."""
        return torch.zeros(numel, dtype=like.dtype, device=self.device or like.device, pin_memory=self.pinned)
