"""Creates a list of parameters for a model if only its size is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from commprof.requested.errors import RequestedError
from commprof.requested.parameters import Parameter

# The sizes of the matrices of a transformer layer, in squares of its width. The matrices are the input and output of
# attention, and the two matrices of the feed-forward part.
MATRICES: Final = {"qkv": 3, "proj": 1, "fc1": 4, "fc2": 4}
_SQUARES: Final = sum(MATRICES.values())
_CUTS: Final = {"qkv": "column", "proj": "row", "fc1": "column", "fc2": "row"}
_WIDTH_PER_LAYER: Final = 128  # as in GPT-3: 96 layers of width 12288


def likely_layers(numel: int) -> int:
    """Return the number of layers of a transformer with ``numel`` parameters whose width is 128 times this number.

    >>> likely_layers(175_000_000_000), likely_layers(1_500_000_000), likely_layers(10)
    (96, 20, 1)
    """
    return max(1, round(math.cbrt(numel / (_SQUARES * _WIDTH_PER_LAYER**2))))


def transformer(numel: int, layers: int) -> list[Parameter]:
    """Return ``numel`` parameters in ``layers`` equal layers of four matrices each, in model order.

    Raises:
        RequestedError: there are fewer parameters than matrices.
    """
    if layers < 1 or numel < layers * _SQUARES:
        raise RequestedError(
            f"{numel} parameters cannot be divided into {layers} layers of {_SQUARES} x width x width parameters; "
            f"expected at least {max(layers, 1) * _SQUARES} parameters, or fewer layers"
        )
    parameters: list[Parameter] = []
    for layer in range(layers):
        share = numel * (layer + 1) // layers - numel * layer // layers
        sizes = {name: share * squares // _SQUARES for name, squares in MATRICES.items()}
        sizes["fc2"] += share - sum(sizes.values())
        parameters += [Parameter(f"layers.{layer}.{name}.weight", size) for name, size in sizes.items()]
    return parameters


def shared_transformer(model: Sequence[Parameter], tensor_ranks: int, stages: int) -> list[Parameter]:
    """Return a rank's shard of each matrix of ``model``, with tensor and pipeline parallelism.

    Args:
        model: All parameters from :func:`transformer`, unpartitioned.
        tensor_ranks: The number of ranks that share each tensor. Two matrices of a layer are partitioned by columns,
            and two by rows.
        stages: The number of pipeline stages. The layers are divided equally among the stages.

    Raises:
        RequestedError: there are fewer layers than stages.
    """
    layers = len(model) // len(MATRICES)
    if layers < stages:
        raise RequestedError(
            f"{layers} layers cannot be divided among {stages} stages; give more (--layers), or fewer stages"
        )
    shards = []
    for number, matrix in enumerate(model):
        name = matrix.name.split(".")[-2]
        squares = MATRICES[name]
        width = math.isqrt(matrix.numel // squares)
        rows, columns = (squares * width, width) if _CUTS[name] == "column" else (width, squares * width)
        own = (rows // tensor_ranks, columns) if _CUTS[name] == "column" else (rows, columns // tensor_ranks)
        shards.append(
            matrix._replace(
                numel=-(-matrix.numel // tensor_ranks),
                shape=f"{own[0]}x{own[1]}",
                whole_shape=f"{rows}x{columns}",
                cut=_CUTS[name] if tensor_ranks > 1 else None,
                stages=str(number // len(MATRICES) * stages // layers) if stages > 1 else None,
            )
        )
    return shards
