"""A seed for each layer, so that initial values do not depend on the stage that builds the layer."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import torch


class LayerSeeds:
    """The seeds that are set before a layer is built and before it runs.

    Args:
        active: Whether the random generators are seeded.
        function: A function that is called with a seed. The default seeds the generators of Python, NumPy and
            torch.
        base: The seed of layer 0.

    A rank may have several chunks of the model. Forward passes are counted separately for each chunk.
    """

    def __init__(self, active: bool, function: Callable[[int], object] | None, base: int) -> None:
        self.active = active
        self.base = base
        self._passes: dict[int, int] = {}
        self._function = function or seed_all

    def before_building(self, layer: int) -> None:
        """Seed the generators before layer number ``layer`` is built."""
        if self.active:
            self._function(self.base + layer)

    def begin_pass(self, chunk: int) -> int:
        """Count a forward pass of chunk ``chunk``, and return the number of the pass, counted from 1."""
        self._passes[chunk] = self._passes.get(chunk, 0) + 1
        return self._passes[chunk]

    def before_running(self, layer: int, number: int) -> None:
        """Seed the generators before layer number ``layer`` runs in forward pass ``number``, counted from 1.

        The rule is that of DeepSpeed 0.19.8.
        """
        if self.active:
            self._function(self.base * (number + 1) + layer)


def seed_all(seed: int) -> None:
    """Seed the generators of Python, of torch on all devices, and of NumPy if NumPy is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
