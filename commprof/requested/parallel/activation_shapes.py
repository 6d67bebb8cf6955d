"""The number and sizes of activations, which a run recorded or which are assumed, because no config contains them.

All sizes are those of one micro-batch. All micro-batches of a step are assumed to have the same sizes.
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
_JOINED_HEADS: Final = 4  # number of all_to_alls: query, key, value, and the result of attention


class Crossing(NamedTuple):
    """The tensors that two pipeline stages exchange in a micro-batch.

    Attributes:
        forward: The bytes of each activation.
        backward: The bytes of each gradient, for the activations that have one.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


class Exchanged(NamedTuple):
    """The bytes of each all_to_all of sequence-parallel attention in a micro-batch, per pass."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Shapes:
    """The known sizes of activations.

    Attributes:
        rows: For each module, the number of rows of its activations, which is the number of tokens in a micro-batch. A
            row has as many elements as the module has inputs or outputs. The key :data:`ALL_MODULES` applies to
            modules that are not named.
        calls: For (module, op), how often each message with this operation is sent, if not once. It is 0 if the input
            needs no gradient, and 2 if a forward pass is repeated.
        losses: The vocabulary-parallel cross entropies, which are modules without parameters.
        others: For each module, the messages (op, bytes) along the model axis that no rule covers.
        exchanged: For each module, the messages along the sequence axis.
        crossings: For (stage, stage), the tensors that are sent between these stages.
        wraps: Whether the last stage sends to the first stage, as with several model chunks per stage.
        scale: The factor for the rows of all modules in this step, because sequences may differ in length.
        assumed: Whether all sizes are assumed, because only the size of the model is known.
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
        """Return the number of rows of the activations of ``module``, or 0 if it is not known."""
        return self.rows.get(module, self.rows.get(ALL_MODULES, 0))


def assumed_shapes(
    config: Mapping[str, Any], parameters: Sequence[Parameter], tokens: int, stages: int, sequence: int
) -> Shapes:
    """Return the shapes of a transformer whose layers have four matrices, as ``memory/sized_models.py`` creates it.

    Args:
        config: The config, which contains the number of samples per micro-batch.
        parameters: The parameters of the model.
        tokens: The sequence length in tokens.
        stages: The number of pipeline stages.
        sequence: The number of ranks that share each sequence.

    Raises:
        RequestedError: the config does not contain the number of samples per micro-batch, or ``sequence`` does not
        divide
            ``tokens``.
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
