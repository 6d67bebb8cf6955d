"""Base of checkpoints that consist of several others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from zero_runtime.checkpoint.opened import OpenCheckpoint


class PartedCheckpoint(OpenCheckpoint):
    """Several checkpoints, read as one. Ranks and files are numbered through all of them in order.

    Args:
        directory: that holds them.
        checkpoints: in order.
    """

    def __init__(self, directory: Path, checkpoints: Sequence[OpenCheckpoint]) -> None:
        super().__init__(directory)
        self._checkpoints = checkpoints

    def verify(self, ranks: Iterable[int]) -> None:
        """Compare files with their checksums; ``ranks`` are numbered through all checkpoints."""
        numbers = [
            (checkpoint, number)
            for checkpoint in self._checkpoints
            for number in range(len(checkpoint.manifest.files))
        ]
        for rank in ranks:
            checkpoint, number = numbers[rank]
            checkpoint.verify([number])

    def random_states(self, rank: int) -> dict[str, torch.Tensor]:
        """Empty: ranks that share a model must draw equal numbers, and other ranks shared it when this was saved."""
        return {}

    def residuals(self, rank: int) -> dict[str, torch.Tensor]:
        """Empty: residuals of gradient compression do not apply once parameters are partitioned in another way."""
        return {}
