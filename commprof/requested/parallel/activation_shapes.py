"""The number and sizes of activations, which no config determines: from a run, or assumed.

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
from commprof.requested.memory.sized_models import MATRICES
from commprof.requested.parameters import Parameter, item_bytes

ALL_MODULES: Final = ""
_JOINED_HEADS: Final = 4  # query, key, value, and the result of attention


class Crossing(NamedTuple):
    """The tensors that one stage sends another in a micro-batch.

    Attributes:
        forward: bytes of each tensor.
        backward: bytes of the gradient of each that has one.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


class Exchanged(NamedTuple):
    """The messages of attention over partitioned sequences in a micro-batch: bytes of each all_to_all, by pass."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Shapes:
    """The known sizes of activations.

    Attributes:
        rows: module -> rows of its activations, each of as many elements as the module has inputs or outputs: the tokens of
            the samples of a micro-batch. Under :data:`ALL_MODULES` the rows of modules that are not named.
        calls: (module, op) -> how often each of its messages with that operation is sent, where that is not once: 0 where
            the input needs no gradient, 2 where a forward pass is repeated.
        losses: modules without parameters that share tokens of the vocabulary: cross entropies.
        others: module -> what it sends along the model axis, (op, bytes), without a rule.
        exchanged: module -> what it exchanges along the sequence axis.
        crossings: (stage, stage) -> what passes between them.
        wraps: whether the last stage sends to the first, as stages with several model chunks do.
        scale: factor of the rows of all modules in this step: sequences may differ in length.
        assumed: whether all this is assumed, for a model whose size alone is known.
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
    config: Mapping[str, Any], parameters: Sequence[Parameter], tokens: int, stages: int, sequence: int
) -> Shapes:
    """Shapes of a transformer whose layers are four matrices each, as ``memory/sized_models.py`` makes them.

    Args:
        config: says how many samples a micro-batch has.
        parameters: of the model.
        tokens: sequence length.
        stages: of a pipeline.
        sequence: ranks that share each sequence.

    Raises:
        RequestedError: the config does not say how many samples a micro-batch has, or ``sequence`` does not divide them.
    """
    samples = read_configuration(config).micro_batch_size
    if samples is None:
        raise RequestedError(
            "train_micro_batch_size_per_gpu is not set, so the size of activations is not known; set it"
        )
    if tokens % sequence:
        raise RequestedError(f"sequences of {tokens} tokens cannot be shared by {sequence} ranks evenly")
    layers = [each for each in parameters if each.name.endswith("qkv.weight")]
    square = max((each.whole_numel for each in layers), default=0) // MATRICES["qkv"]
    size = item_bytes(read_configuration(config).model_dtype or "float32")
    activation = samples * tokens * isqrt(square) * size
    share = activation // sequence
    names = [each.module.rpartition(".")[0] for each in layers] if sequence > 1 else []
    exchanged = {name: Exchanged((share,) * _JOINED_HEADS, (share,) * _JOINED_HEADS) for name in names}
    crossing = Crossing((activation,), (activation,))
    crossings = {pair: crossing for stage in range(stages - 1) for pair in [(stage, stage + 1)]}
    return Shapes({ALL_MODULES: samples * tokens}, exchanged=exchanged, crossings=crossings, assumed=True)
