"""Replaces the values that a config leaves open (``auto``).

A recorded run contains the values that its start decided. Before a run, the rules decide the values that they can:
``gradient_accumulation_reduce`` by the configured limit, and sizes by a calibration. A value that depends only on the
machine keeps its default, and a sentence explains the assumption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from commprof.requested.communication.measured_costs import Cost, read_costs, smallest_payload
from commprof.requested.config_keys import count, section
from commprof.requested.configuration import Configuration, read_configuration, zero_section
from commprof.requested.errors import UnsupportedError
from commprof.requested.parameters import Parameter, item_bytes
from commprof.schema import Op

_ZERO: Final = "zero_optimization"
_REDUCE: Final = "gradient_accumulation_reduce"
_LIMIT: Final = "gradient_accumulation_limit"
_SIZES: Final = {
    "reduce_bucket_size": "500,000,000 elements",
    "allgather_bucket_size": "all at once",
    "stage3_prefetch_bucket_size": "50,000,000 elements",
    "prefetch_bucket_size": "50,000,000 elements",
}
_EVEN: Final = 2  # shards are aligned to 2 elements


class Decided(NamedTuple):
    """A config whose open values are decided.

    Attributes:
        config: The config with the decided values.
        sentences: For each open value, a sentence about the decision and its reason, or about the assumption.
    """

    config: Mapping[str, Any]
    sentences: tuple[str, ...] = ()


def decide(
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    world_size: int,
    backend: str,
    costs: Mapping[Op, Cost] | None = None,
) -> Decided:
    """Replace the open values of ``config``.

    Args:
        config: The config as zero_runtime reads it.
        parameters: The parameters of one rank.
        world_size: The number of ranks among which gradients are reduced.
        backend: The backend of their process group.
        costs: The costs of a calibration, or None for the calibration that the config names, if it names one.

    Raises:
        RequestedError: a key has a value of the wrong type or outside its range.
    """
    block = config.get(_ZERO)
    if not isinstance(block, Mapping) or "auto" not in [block.get(name) for name in (_REDUCE, *_SIZES)]:
        return Decided(config)
    values, sentences = dict(block), []
    if block.get(_REDUCE) == "auto":
        values[_REDUCE], sentence = _accumulation_reduce(config, parameters)
        sentences.append(sentence)
    for name in _SIZES:
        by_block = name == "reduce_bucket_size" and block.get("stage3_gather_unit") == "block"
        if block.get(name) == "auto" and not by_block and _acts(name, read_configuration(config)):
            numel, sentence = _size(name, config, parameters, world_size, backend, costs)
            sentences.append(sentence)
            if numel is not None:
                values[name] = numel
    # A key that is still auto has its default value, as in DeepSpeed.
    return Decided({**config, _ZERO: values}, tuple(sentences))


def filled(config: Mapping[str, Any], effective: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return ``config`` with each ``auto`` value replaced by the value that a run decided.

    Args:
        config: The config as the user wrote it.
        effective: The config as the engine of the run published it, or None if the engine published none.
    """
    block, decided = config.get(_ZERO), (effective or {}).get(_ZERO)
    if not isinstance(block, Mapping) or not isinstance(decided, Mapping):
        return config
    values = dict(block)
    for name in (_REDUCE, *_SIZES):
        # The keys of stage 3 exist with and without the prefix ``stage3_``.
        decision = decided.get(name, decided.get(f"stage3_{name}", decided.get(name.removeprefix("stage3_"))))
        if block.get(name) == "auto" and decision is not None:
            values[name] = decision
    return {**config, _ZERO: values}


def whole_gradient_bytes(config: Mapping[str, Any], parameters: Sequence[Parameter]) -> int:
    """Return the bytes of all gradients together, in the element type in which they are accumulated."""
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
            f"{name}: decided at the start of the run by the free memory (whole gradients need {needed:,} bytes); "
            f"each is assumed here. Set {_LIMIT} to decide it before the run"
        )
    fits = needed <= limit
    relation = "within" if fits else "more than"
    chosen = "boundary" if fits else "each"
    return (
        chosen,
        f"{name}: {chosen}, since whole gradients need {needed:,} bytes, {relation} {_LIMIT} {limit:,}",
    )


def _acts(name: str, configuration: Configuration) -> bool:
    if name == "reduce_bucket_size":
        in_buckets = configuration.partitions and not configuration.reduces_flat_groups
        return in_buckets or configuration.reduces_whole_in_buckets
    if name == "allgather_bucket_size":
        return configuration.stage in (1, 2) and not configuration.gather_by_broadcast
    return configuration.stage == 3


def _size(
    name: str,
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    world_size: int,
    backend: str,
    costs: Mapping[Op, Cost] | None,
) -> tuple[int | None, str]:
    """Return the decided number of elements for the key ``name``, or None for its default, and a sentence."""
    configuration = read_configuration(config)
    key, default = f"{_ZERO}.{name} is auto", _SIZES[name]
    if world_size == 1:
        return None, f"{key}: the default, {default}, since one rank sends nothing"
    op = _reducing(configuration, backend) if name == "reduce_bucket_size" else Op.ALL_GATHER
    dtype = configuration.model_dtype or (parameters[0].dtype if parameters else "float32")
    item = item_bytes(configuration.communication_dtype if name == "reduce_bucket_size" else dtype)
    path = section(section(config, "communication"), "calibration").get("world")
    rule = f"the smallest {op} among {world_size} ranks at 90 % of its bandwidth"
    if costs is None and path is not None:
        try:
            costs = read_costs(str(path), (op,))
        except UnsupportedError as error:
            return None, f"{key}: the default, {default}, is assumed here; {error}"
    if costs is None:
        return None, (
            f"{key}: the start of the run measures {rule}; the default, {default}, is assumed here. Give "
            "--calibration or communication.calibration.world to decide it before the run"
        )
    if op not in costs:
        return (
            None,
            f"{key}: the default, {default}, is assumed here; the calibration has no fitted times of {op}",
        )
    if costs[op].alpha_ns <= 0.0:
        return None, (
            f"{key}: the default, {default}, since the calibration has a latency of 0 for {op}, with which every size "
            "reaches 90 % of its bandwidth; calibrate again on a machine that does nothing else"
        )
    numel = _elements(smallest_payload(costs[op], op, world_size), item)
    return numel, f"{key}: {numel:,} elements ({numel * item:,} bytes), {rule}, by the calibration"


def _elements(payload_bytes: float, item: int) -> int:
    """Return an even number of elements for ``payload_bytes``.

    The payload is rounded first, so that the order of the arithmetic does not matter.
    """
    return max(1, -(-math.ceil(round(payload_bytes, 3) / item) // _EVEN)) * _EVEN


def _reducing(configuration: Configuration, backend: str) -> Op:
    """Return the operation whose bandwidth determines the size of gradient buckets."""
    if configuration.reduction == "reduce_scatter":
        native = configuration.reduce_scatter_on(backend) == "native"
        return Op.REDUCE_SCATTER if native else Op.ALL_TO_ALL
    return Op.REDUCE if configuration.reduction == "reduce_to_owner" else Op.ALL_REDUCE
