"""Which memory slices are kept in (stage 3)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Place(NamedTuple):
    """Where slices are kept in memory.

    Attributes:
        device: None for the parameters' own.
        pinned: page-locked host memory.
    """

    device: torch.device | None = None
    pinned: bool = False

    def zeros(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Memory there for ``numel`` elements of the dtype of ``like``, a parameter."""
        return torch.zeros(numel, dtype=like.dtype, device=self.device or like.device, pin_memory=self.pinned)
