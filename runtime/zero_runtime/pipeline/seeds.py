"""Seeds of single layers, so that their initial values do not depend on which stage builds them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import torch


class LayerSeeds:
    """Seeds the random generators before a layer is built, and before it runs.

    Args:
        active: otherwise nothing is seeded.
        function: called with a seed, in place of seeding Python's, NumPy's and torch's generators.
        base: the seed of layer 0.

    A rank may have several parts of the model, whose forward passes are counted apart.
    """

    def __init__(self, active: bool, function: Callable[[int], object] | None, base: int) -> None:
        self.active = active
        self.base = base
        self._passes: dict[int, int] = {}
        self._function = function or seed_all

    def before_building(self, layer: int) -> None:
        """Layer number ``layer`` is built next."""
        if self.active:
            self._function(self.base + layer)

    def begin_pass(self, chunk: int) -> int:
        """The number of the forward pass of part ``chunk`` that begins now, from 1."""
        self._passes[chunk] = self._passes.get(chunk, 0) + 1
        return self._passes[chunk]

    def before_running(self, layer: int, number: int) -> None:
        """Layer number ``layer`` runs next, in forward pass ``number``, counted from 1; DeepSpeed 0.19.8's seed."""
        if self.active:
            self._function(self.base * (number + 1) + layer)


def seed_all(seed: int) -> None:
    """Seed the generators of Python, of torch on all devices, and of NumPy where it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
