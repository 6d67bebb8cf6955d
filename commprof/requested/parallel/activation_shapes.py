"""What no config tells of activations: how many there are. A run shows it, or it is assumed; the rules take it from here.

All sizes are those of one micro-batch, and of a step in which all have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isqrt
from typing import Any, Final, NamedTuple

from commprof.requested.configuration import read_configuration
from commprof.requested.errors import RequestedError
from commprof.requested.memory.models import MATRICES
from commprof.requested.parameters import Parameter, item_bytes

ALL_MODULES: Final = ""
_JOINED_HEADS: Final = 4  # query, key, value, and what attention makes of them


class Crossing(NamedTuple):
    """What one stage sends another in a micro-batch.

    Attributes:
        forward: bytes of each tensor.
        backward: bytes of the gradient of each that has one.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


class Exchanged(NamedTuple):
    """What attention over pieces of sequences sends in a micro-batch: bytes of each all_to_all, by pass."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Shapes:
    """What is known of activations.

    Attributes:
        rows: module -> rows of its activations, each of as many elements as the module has inputs or outputs: the words of
            the samples of a micro-batch. Under :data:`ALL_MODULES` the rows of modules that are not named.
        calls: (module, op) -> how often each of its messages with that operation is sent, where that is not once: 0 where
            nothing asks for the gradient of an input, 2 where a forward pass is repeated.
        losses: modules without parameters that share words: cross entropies.
        others: module -> what it sends along the model axis, (op, bytes), of which no rule speaks.
        exchanged: module -> what it exchanges along the sequence axis.
        crossings: (stage, stage) -> what passes between them.
        wraps: whether the last stage passes something on to the first, as stages with several parts of the model do.
        scale: how many times as many rows all modules have in the step at hand: sequences may differ in length.
        assumed: whether all this is assumed of a model of which only the size is known.
    """

    rows: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[tuple[str, str], int] = field(default_factory=dict)
    losses: Sequence[str] = ()
    others: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    exchanged: Mapping[str, Exchanged] = field(default_factory=dict)
    crossings: Mapping[tuple[int, int], Crossing] = field(default_factory=dict)
    wraps: bool = False
    scale: Fraction = Fraction(1)
    assumed: bool = False

    def rows_of(self, module: str) -> int:
        """Rows of the activations of ``module``; 0 where they are not known."""
        return self.rows.get(module, self.rows.get(ALL_MODULES, 0))


def assumed_shapes(
    config: Mapping[str, Any], parameters: Sequence[Parameter], words: int, stages: int, sequence: int
) -> Shapes:
    """Shapes of a transformer whose layers are four matrices each, as :mod:`commprof.requested.memory.models` makes them.

    Args:
        config: says how many samples a micro-batch has.
        parameters: of the model.
        words: of a sample.
        stages: of a pipeline.
        sequence: ranks that share each sequence.

    Raises:
        RequestedError: the config does not say how many samples a micro-batch has, or ``sequence`` does not divide them.
    """
    samples = read_configuration(config).micro_batch_size
    if samples is None:
        raise RequestedError(
            "train_micro_batch_size_per_gpu is not set, so the size of activations cannot be told; set it"
        )
    if words % sequence:
        raise RequestedError(f"sequences of {words} words cannot be shared by {sequence} ranks evenly")
    layers = [each for each in parameters if each.name.endswith("qkv.weight")]
    square = max((each.whole_numel for each in layers), default=0) // MATRICES["qkv"]
    size = item_bytes(read_configuration(config).model_dtype or "float32")
    activation = samples * words * isqrt(square) * size
    piece = activation // sequence
    names = [each.module.rpartition(".")[0] for each in layers] if sequence > 1 else []
    exchanged = {name: Exchanged((piece,) * _JOINED_HEADS, (piece,) * _JOINED_HEADS) for name in names}
    crossing = Crossing((activation,), (activation,))
    crossings = {pair: crossing for stage in range(stages - 1) for pair in [(stage, stage + 1)]}
    return Shapes({ALL_MODULES: samples * words}, exchanged=exchanged, crossings=crossings, assumed=True)
