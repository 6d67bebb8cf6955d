"""Predict the activations of a rank, by a traced pass if the model was built, or else by a formula from its size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from commprof.plan.memory.spans import Activations, Span
from commprof.plan.models import Builder, Model, prints_on_stderr
from commprof.requested.configuration import autocast_dtype, read_configuration, zero_section
from commprof.requested.experts.layers import ExpertLayer
from commprof.requested.memory.sized_models import MATRICES
from commprof.requested.parallel import axis_rules
from commprof.requested.parallel.axes import DATA, MODEL, PIPE, SEQUENCE, Axes
from commprof.requested.parameters import item_bytes
from commprof.requested.zero.gather_configuration import read_gather_configuration

NO_MICRO_BATCH: Final = "the config sets no train_micro_batch_size_per_gpu"
NO_SEQUENCE: Final = "give --sequence"
NO_LAYERS: Final = "a run records only the parameters of its model"
NO_INPUTS: Final = "give --sequence if its input is token ids, or let the function return (model, inputs)"
# The number of values for each token in a layer of a transformer, as a multiple of its width: the values that
# attention, feed-forward and the two norms keep, and the one-byte masks of two dropouts. Source: Korthikanti et al.
# 2022, equation 1, without the terms with a s / h.
_VALUES: Final = 16
_MASKS: Final = 2
# The part of these values that feed-forward keeps: the inputs of its two matrices and of the activation function.
_FEED_FORWARD_VALUES: Final = 9
_WIDE: Final = 4  # bytes of an fp32 number
# The part of ``_VALUES`` that is divided among tensor-parallel ranks (equation 2: 24 / t of 34 bytes).
_SHARED_VALUES: Final = 12


def activations_of(
    config: Mapping[str, Any], model: Model, axes: Axes, sequence: int | None
) -> tuple[Activations | None, str]:
    """Return the activations of rank 0 and an empty text, or None and the reason why they are not known.

    Args:
        config: The setting.
        model: The model that is trained.
        axes: The axes along which the ranks are arranged.
        sequence: The number of tokens of a sequence, or None if it is not given.
    """
    configuration = read_configuration(config)
    micro_batch = micro_batch_of(config, axes)
    if micro_batch is None:
        return None, NO_MICRO_BATCH
    computed = autocast_dtype(config)
    if model.from_sequence and sequence is None:
        return None, NO_SEQUENCE
    if model.build is not None:
        is_sharded = configuration.stage == 3
        weight_first = is_sharded and read_gather_configuration(zero_section(config)).weight_before_bias
        dtypes = configuration.model_dtype, computed
        return _traced(model.build, micro_batch, sequence, *dtypes, is_sharded, weight_first, model.experts)
    if model.layers is None:
        return None, NO_LAYERS
    if sequence is None:
        return None, NO_SEQUENCE
    item = item_bytes(computed or configuration.model_dtype or "float32")
    tokens = micro_batch * -(-sequence // axes.size(SEQUENCE))
    return _by_formula(model, tokens, item, axes.size(MODEL), axes.size(PIPE)), ""


def micro_batch_of(config: Mapping[str, Any], axes: Axes) -> int | None:
    """Return the number of samples of a micro-batch, or None if the config does not set it."""
    configuration = read_configuration(config)
    if configuration.micro_batch_size is not None or configuration.train_batch_size is None:
        return configuration.micro_batch_size
    of_replica = configuration.train_batch_size // axes.size(DATA)
    return max(of_replica // axis_rules.micro_batches(config, axes), 1)


def _by_formula(model: Model, tokens: int, item: int, tensor_ranks: int, stages: int) -> Activations:
    """Return the activations of the layers of rank 0 by the formula of Korthikanti et al. 2022.

    A layer keeps its values until its backward pass. The first pipeline stage keeps the values of as many
    micro-batches as there are stages.
    """
    of_layers: dict[str, list[str]] = {}
    for parameter in model.parameters:
        of_layers.setdefault(".".join(parameter.name.split(".")[:2]), []).append(parameter.name)
    experts = {layer.layer.rpartition(".")[0]: layer for layer in model.experts}
    width = math.sqrt(model.parameters[0].numel / MATRICES["qkv"])
    own = (_VALUES - _SHARED_VALUES) * item + _MASKS + _SHARED_VALUES * item / tensor_ranks
    own_layers = list(of_layers.items())[: -(-len(of_layers) // stages)]
    sizes = []
    for name, _ in own_layers:
        more = _of_experts(experts[name], tokens, item, width) if name in experts else 0.0
        sizes.append(tokens * width * own + more)
    alive = sum(sizes) * (stages - 1)  # activations of micro-batches that wait for their backward pass
    spans = []
    for number, (_, names) in reversed(list(enumerate(own_layers))):
        most = round(alive + sum(sizes[: number + 1]))
        spans += [Span(most, most, each) for each in reversed(names)]
    return Activations((*spans, Span(round(alive), round(alive), "")), "by a formula, without checkpointing")


def _of_experts(layer: ExpertLayer, tokens: int, item: int, width: float) -> float:
    """Return the bytes that a layer keeps in addition if it has experts.

    The tensors are those of :mod:`commprof.plan.memory.expert_passes`.
    """
    layer = layer._replace(tokens=tokens)
    slots = layer.num_experts * layer.capacity
    gate = _WIDE * tokens * width if item < _WIDE else 0.0  # the gate reads the tokens in fp32
    results = layer.k * tokens * width * item
    return (slots - tokens) * width * _FEED_FORWARD_VALUES * item + gate + results


@lru_cache(maxsize=16)
def _traced(
    build: Builder,
    micro_batch: int,
    sequence: int | None,
    model_dtype: str | None,
    computed: str | None,
    is_sharded: bool,
    weight_first: bool,
    experts: tuple[ExpertLayer, ...],
) -> tuple[Activations | None, str]:
    import torch

    from commprof.plan.memory.expert_passes import place_experts
    from commprof.plan.memory.traced_pass import TraceError, trace

    module, inputs = build(micro_batch, sequence)
    if inputs is None:
        return None, NO_INPUTS
    place_experts(module, experts)
    dtype, autocast = (None if name is None else getattr(torch, name) for name in (model_dtype, computed))
    try:
        with prints_on_stderr():
            spans = trace(module, inputs, dtype, autocast, is_sharded, weight_first)
    except TraceError as problem:
        return None, f"{problem}; use --model py:module:function with a function that returns (model, inputs)"
    return Activations(tuple(spans), "of one traced pass", is_traced=True), ""
