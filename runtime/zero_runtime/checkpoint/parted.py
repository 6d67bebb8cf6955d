"""Several checkpoints opened as one, whatever each of them has of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from zero_runtime.checkpoint.opened import OpenCheckpoint


class PartedCheckpoint(OpenCheckpoint):
    """What is common to checkpoints that are made of others: ranks and files are counted part by part.

    Args:
        directory: that holds them.
        parts: the checkpoints, in order.
    """

    def __init__(self, directory: Path, checkpoints: Sequence[OpenCheckpoint]) -> None:
        super().__init__(directory)
        self._checkpoints = checkpoints

    def verify(self, ranks: Iterable[int]) -> None:
        """Compare files with their checksums; they are numbered part by part."""
        numbers = [
            (checkpoint, number)
            for checkpoint in self._checkpoints
            for number in range(len(checkpoint.manifest.files))
        ]
        for rank in ranks:
            checkpoint, number = numbers[rank]
            checkpoint.verify([number])

    def random_states(self, rank: int) -> dict[str, torch.Tensor]:
        """The states of the random generators of ``rank``, counted part by part."""
        for checkpoint in self._checkpoints:
            files = len(checkpoint.manifest.files)
            if rank < files:
                return checkpoint.random_states(rank)
            rank -= files
        return {}

    def residuals(self, rank: int) -> dict[str, torch.Tensor]:
        """Nothing: what gradient compression had left over is of parameters that are elsewhere, or cut otherwise, now."""
        return {}
