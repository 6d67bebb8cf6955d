"""The values that a config leaves open (``auto``), and what the start of a run decides about them.

A recorded run has the decided values. Before a run, the rules decide what they can: ``gradient_accumulation_reduce`` by a
stated limit. What depends on the machine alone is a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from commprof.requested.configuration import read_configuration, zero_section
from commprof.requested.keys import count
from commprof.requested.parameters import Parameter, item_bytes

_ZERO: Final = "zero_optimization"
_REDUCE: Final = "gradient_accumulation_reduce"
_LIMIT: Final = "gradient_accumulation_limit"


class Decided(NamedTuple):
    """A config without open values.

    Attributes:
        config: with the decided values.
        sentences: what was decided and why, or what is assumed instead.
    """

    config: Mapping[str, Any]
    sentences: tuple[str, ...] = ()


def decide(config: Mapping[str, Any], parameters: Sequence[Parameter]) -> Decided:
    """Replace the open values of ``config``.

    Args:
        config: as zero_runtime reads it.
        parameters: of one rank.

    Raises:
        RequestedError: a key has a value of the wrong type or outside its range.
    """
    block = config.get(_ZERO)
    if not isinstance(block, Mapping) or block.get(_REDUCE) != "auto":
        return Decided(config)
    value, sentence = _accumulation_reduce(config, parameters)
    return Decided({**config, _ZERO: {**block, _REDUCE: value}}, (sentence,))


def whole_gradient_bytes(config: Mapping[str, Any], parameters: Sequence[Parameter]) -> int:
    """Bytes of the gradients of all trained parameters, in the type in which they are accumulated."""
    configuration = read_configuration(config)
    return sum(
        each.numel * item_bytes(configuration.accumulation_dtype or configuration.model_dtype or each.dtype)
        for each in parameters
        if each.requires_grad
    )


def _accumulation_reduce(config: Mapping[str, Any], parameters: Sequence[Parameter]) -> tuple[str, str]:
    configuration = read_configuration(config)
    name = f"{_ZERO}.{_REDUCE} is auto"
    if configuration.stage < 2:
        return (
            "each",
            f"{name}, which has no effect at stage {configuration.stage}: gradients are reduced once a step",
        )
    if not configuration.managed_accumulation:
        return "each", f"{name}: each, since managed_gradient_accumulation is false"
    limit = count(zero_section(config), f"{_ZERO}.{_LIMIT}", None, least=0)
    needed = whole_gradient_bytes(config, parameters)
    if limit is None:
        return "each", (
            f"{name}: the start of the run decides by the free memory, of which whole gradients need {needed:,} bytes; each "
            f"is assumed here, and {_LIMIT} decides before"
        )
    fits = needed <= limit
    relation = "within" if fits else "more than"
    chosen = "boundary" if fits else "each"
    return (
        chosen,
        f"{name}: {chosen}, since whole gradients need {needed:,} bytes, {relation} {_LIMIT} {limit:,}",
    )
