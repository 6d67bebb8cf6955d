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

    Attributes:
        passes: forward passes that have begun.
    """

    def __init__(self, active: bool, function: Callable[[int], object] | None, base: int) -> None:
        self.active = active
        self.base = base
        self.passes = 0
        self._function = function or seed_all

    def before_building(self, layer: int) -> None:
        """Layer number ``layer`` is built next."""
        if self.active:
            self._function(self.base + layer)

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
