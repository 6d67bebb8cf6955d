"""The base class of checkpoints that consist of several checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from zero_runtime.checkpoint.opened import OpenCheckpoint


class PartedCheckpoint(OpenCheckpoint):
    """Several checkpoints, read as one checkpoint. Ranks and files are numbered consecutively over all checkpoints.

    Args:
        directory: The directory that contains the checkpoints.
        checkpoints: The checkpoints in order.
    """

    def __init__(self, directory: Path, checkpoints: Sequence[OpenCheckpoint]) -> None:
        super().__init__(directory)
        self._checkpoints = checkpoints

    def verify(self, ranks: Iterable[int]) -> None:
        """Compare files with their checksums. ``ranks`` are numbered consecutively over all checkpoints."""
        numbers = [
            (checkpoint, number)
            for checkpoint in self._checkpoints
            for number in range(len(checkpoint.manifest.files))
        ]
        for rank in ranks:
            checkpoint, number = numbers[rank]
            checkpoint.verify([number])

    def random_states(self, rank: int) -> dict[str, torch.Tensor]:
        """Return an empty dictionary.

        Ranks that share a model must draw equal numbers, and different ranks shared the model when it was
        saved.
        """
        return {}

    def residuals(self, rank: int) -> dict[str, torch.Tensor]:
        """Return an empty dictionary.

        Residuals of gradient compression do not apply to parameters that are partitioned in a different way.
        """
        return {}
