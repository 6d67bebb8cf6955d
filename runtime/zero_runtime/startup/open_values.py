"""Values that a configuration leaves open until the start of a training (``auto``).

Rank 0 decides them for all ranks.

The ranks communicate through the store of the process group, so that no message is added. A rank that decided
alone would send different messages than the other ranks, and hang.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final, NamedTuple

import torch

from zero_runtime import comm, log
from zero_runtime.comm import DataParallelGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration.blocks.zero_block import ZeroConfig
from zero_runtime.gradient_reduction.stages import BOUNDARY, EACH
from zero_runtime.groups.agreements import as_first_decides
from zero_runtime.sharding.shards import shard_of
from zero_runtime.startup.memory_status import free_bytes
from zero_runtime.startup.open_sizes import with_sizes

# The share of the free memory for gradients and states. The rest is for activations, whose size is not known before
# the first pass.
_FREE_SHARE: Final = 0.5
_STATE_BYTES: Final = 12  # for each element of a shard: the fp32 master and two fp32 states of Adam
_KEY: Final = "zero_optimization.gradient_accumulation_reduce"


class _Need(NamedTuple):
    """The memory that a rank needs and has, in bytes.

    Attributes:
        gradients: The gradients of all trained parameters.
        states: The states that the engine allocates: parameters that are not on the device yet, masters and
            optimizer states.
        free: The free memory of the rank's device.
    """

    gradients: int
    states: int
    free: int


def decide(config: RuntimeConfig, module: torch.nn.Module, group: DataParallelGroup) -> RuntimeConfig:
    """Return ``config`` without open values. Rank 0 prints their cost. All ranks must call this function.

    Args:
        config: the configuration.
        module: the model, before it is moved and sharded.
        group: The ranks among which the optimizer states will be sharded.
    """
    config = with_sizes(config, group)
    zero = config.zero
    if zero.gradient_accumulation_reduce != EACH and config.gradient_accumulation_steps > 1:
        need = _need(config, module, group)
        zero = _accumulation_reduce(config, need)
        if comm.get_rank() == 0 and (zero.stage.waits or zero is not config.zero):
            log.info(_price(config, zero, need.gradients))
    elif zero.gradient_accumulation_reduce not in (EACH, BOUNDARY):
        zero = dataclasses.replace(zero, gradient_accumulation_reduce=EACH)
    return dataclasses.replace(config, zero=zero)


def _need(config: RuntimeConfig, module: torch.nn.Module, group: DataParallelGroup) -> _Need:
    widths = {"fp32": 4, "fp16": 2, "bf16": 2}
    accumulated = config.precision.grad_accum_dtype or config.precision.model
    gradients = sum(
        _numel(each) * (widths.get(accumulated or "", 0) or each.element_size())
        for each in module.parameters()
        if each.requires_grad
    )
    states = sum(_state_bytes(each, group) for each in module.parameters())
    return _Need(gradients, states, free_bytes(group.device))


def _state_bytes(parameter: torch.nn.Parameter, group: DataParallelGroup) -> int:
    moved = 0 if parameter.device.type == group.device.type else parameter.numel() * parameter.element_size()
    return moved + (_STATE_BYTES * _numel(parameter) // group.world_size if parameter.requires_grad else 0)


def _numel(parameter: torch.nn.Parameter) -> int:
    shard = shard_of(parameter)
    return parameter.numel() if shard is None else shard.numel


def _accumulation_reduce(config: RuntimeConfig, need: _Need) -> ZeroConfig:
    """Return the ZeRO configuration with ``auto`` replaced in ``gradient_accumulation_reduce``.

    The value is boundary if whole gradients fit on every rank.
    """
    zero, limit = config.zero, config.zero.gradient_accumulation_limit
    value = zero.gradient_accumulation_reduce
    if value not in (EACH, BOUNDARY):
        all_of_it = need.gradients + need.states
        fits = need.gradients <= limit if limit is not None else all_of_it <= need.free * _FREE_SHARE
        possible = config.managed_gradient_accumulation

        def boundary_if_all(answers: Iterable[str]) -> str:
            return BOUNDARY if all(each == "1" for each in answers) else EACH

        value = as_first_decides("accumulation", str(int(fits and possible)), boundary_if_all)
    stage = zero.stage._replace(waits=zero.stage.shards_gradients and value == BOUNDARY)
    return dataclasses.replace(zero, gradient_accumulation_reduce=value, stage=stage)


def _price(config: RuntimeConfig, zero: ZeroConfig, gradients: int) -> str:
    steps = config.gradient_accumulation_steps
    if zero.stage.waits:
        return (
            f"{_KEY} is boundary: each rank keeps {gradients:,} bytes of whole gradients until the last of {steps} "
            f"micro-batches, and reduces them once a step instead of {steps} times"
        )
    limit = zero.gradient_accumulation_limit
    why = (
        "half of the free memory, with the states"
        if limit is None
        else f"gradient_accumulation_limit {limit:,}"
    )
    if not config.managed_gradient_accumulation:
        why = "which needs managed_gradient_accumulation"
    return (
        f"{_KEY} is each: boundary would keep {gradients:,} bytes of whole gradients on each rank, more than {why}, to "
        f"reduce them once a step instead of {steps} times"
    )
