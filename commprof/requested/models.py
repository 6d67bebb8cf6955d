"""A list of parameters for a model of which only the size is known."""

from __future__ import annotations

import math
from typing import Final

from commprof.requested.errors import RequestedError
from commprof.requested.parameters import Parameter

# The matrices of a transformer's layer, in squares of its width: attention in and out, and the two of the feed-forward part.
_MATRICES: Final = (("qkv", 3), ("proj", 1), ("fc1", 4), ("fc2", 4))
_SQUARES: Final = sum(squares for _, squares in _MATRICES)
_WIDTH_PER_LAYER: Final = 128  # as in GPT-3: 96 layers of width 12288


def likely_layers(numel: int) -> int:
    """How many layers a transformer of ``numel`` parameters has whose width is 128 times that.

    >>> likely_layers(175_000_000_000), likely_layers(1_500_000_000), likely_layers(10)
    (96, 20, 1)
    """
    return max(1, round(math.cbrt(numel / (_SQUARES * _WIDTH_PER_LAYER**2))))


def transformer(numel: int, layers: int) -> list[Parameter]:
    """``numel`` parameters in ``layers`` equal layers of four matrices each, in the order of the model.

    Raises:
        RequestedError: there are fewer parameters than matrices.
    """
    if layers < 1 or numel < layers * _SQUARES:
        raise RequestedError(
            f"{numel} parameters cannot be those of {layers} layers of {_SQUARES} squares of a width; expected at least "
            f"{max(layers, 1) * _SQUARES}, or fewer layers"
        )
    found: list[Parameter] = []
    for layer in range(layers):
        share = numel * (layer + 1) // layers - numel * layer // layers
        sizes = {name: share * squares // _SQUARES for name, squares in _MATRICES}
        sizes["fc2"] += share - sum(sizes.values())
        found += [Parameter(f"layers.{layer}.{name}.weight", size) for name, size in sizes.items()]
    return found
