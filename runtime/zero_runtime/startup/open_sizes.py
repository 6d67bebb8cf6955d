"""Message sizes that a configuration leaves open (``auto``). Rank 0 decides them for all ranks."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from zero_runtime import comm, log
from zero_runtime.comm import DataParallelGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration.blocks.zero_block import DEFAULT_SIZES, PREFETCH_SIZE, REDUCE_SIZE, ZeroConfig
from zero_runtime.errors import ConfigError
from zero_runtime.experimental.topology_aware.costs import Cost, read_costs
from zero_runtime.gradient_reduction.reduction import default_implementation
from zero_runtime.groups.agreements import as_first_decides
from zero_runtime.optimizer_step.dtypes import precision
from zero_runtime.sharding.gather_schedule.gathered_blocks import BLOCK
from zero_runtime.startup.message_sizes import SHARE, measured_cost, smallest_payload

_ERROR: Final = "error"
_EVEN: Final = 2  # shards are aligned to 2 elements


class _Message(NamedTuple):
    """The messages that a size limits, which have one operation and dtype."""

    operation: str
    dtype: torch.dtype


def with_sizes(config: RuntimeConfig, group: DataParallelGroup) -> RuntimeConfig:
    """Return ``config`` with values for the sizes that are auto. Rank 0 prints them.

    All ranks must call this function.

    Args:
        config: the configuration.
        group: The ranks that exchange the messages.

    Raises:
        ConfigError: Rank 0 cannot read the calibration. The error is raised on every rank.
    """
    zero = config.zero
    # The bucket size is unused in two cases: with fp32 accumulation at stage 1 all gradients are one message, and
    # gradients that are reduced by blocks have no buckets. A single rank sends nothing.
    unused = config.accumulates_whole or zero.sharding.residency.unit == BLOCK
    names = [name for name in zero.open_sizes if name != REDUCE_SIZE or not unused]
    if not names or comm.get_world_size() == 1:
        return dataclasses.replace(config, zero=dataclasses.replace(zero, open_sizes=()))
    messages = {name: _message(name, config, group) for name in names}
    path = config.communication.world_calibration
    costs: dict[_Message, Cost] = {}  # on rank 0
    if path is None and 0 in group.global_ranks and group.world_size > 1:
        costs = {each: measured_cost(group, *each) for each in dict.fromkeys(messages.values())}

    def decide(_: Any) -> str:
        try:
            if path is not None:
                costs.update(_calibrated(path, messages))
        except ConfigError as error:
            return json.dumps({_ERROR: str(error)})
        return json.dumps(
            {
                name: _numel(costs.get(each), each, group) or DEFAULT_SIZES[name]
                for name, each in messages.items()
            }
        )

    decided = json.loads(as_first_decides("sizes", "", decide))
    if _ERROR in decided:
        raise ConfigError(decided[_ERROR])
    if comm.get_rank() == 0:
        source = f"the calibration {path}" if path is not None else "a measurement at the start"
        for name, numel in decided.items():
            log.info(_sentence(name, numel, messages[name], costs.get(messages[name]), group, source))
    return dataclasses.replace(config, zero=_set(zero, decided))


def _message(name: str, config: RuntimeConfig, group: DataParallelGroup) -> _Message:
    kinds = precision(config.precision)
    if name != REDUCE_SIZE:
        return _Message("all_gather", kinds.model or torch.float32)
    reduction = config.zero.gradient_reduction
    if reduction == "reduce_scatter":
        implementation = config.zero.reduce_scatter_impl or default_implementation(group.backend)
        operation = "reduce_scatter" if implementation == "native" else "all_to_all"
    else:
        operation = "reduce" if reduction == "reduce_to_owner" else "all_reduce"
    return _Message(operation, kinds.communication)


def _calibrated(path: str, messages: Mapping[str, _Message]) -> dict[_Message, Cost]:
    costs = read_costs(path, sorted({each.operation for each in messages.values()}))
    return {each: costs[each.operation] for each in messages.values()}


def _numel(cost: Cost | None, message: _Message, group: DataParallelGroup) -> int | None:
    """Return the elements of the smallest message at 90 % of the bandwidth, an even number.

    The result is None without a cost or a latency.
    """
    if cost is None or cost.alpha_ns <= 0.0:
        return None
    payload = smallest_payload(cost, message.operation, group.world_size)
    # Rounded first, so that the size does not depend on the order of the arithmetic.
    elements = math.ceil(round(payload, 3) / message.dtype.itemsize)
    return max(1, -(-elements // _EVEN)) * _EVEN


def _sentence(
    name: str, numel: int | None, message: _Message, cost: Cost | None, group: DataParallelGroup, source: str
) -> str:
    key = f"zero_optimization.{name} is auto"
    if cost is not None and cost.alpha_ns <= 0.0:
        return (
            f"{key}: the default, since {source} has a latency of 0 for {message.operation}, with which every size reaches "
            f"{SHARE:.0%} of its bandwidth; calibrate again on a machine that does nothing else"
        )
    if numel is None or group.world_size == 1:
        return f"{key}: the default, since no other rank has the parameters of rank 0"
    return (
        f"{key}: {numel:,} elements ({numel * message.dtype.itemsize:,} bytes), the smallest {message.operation} among "
        f"{group.world_size} ranks at {SHARE:.0%} of its bandwidth, by {source}"
    )


def _set(zero: ZeroConfig, decided: Mapping[str, int | None]) -> ZeroConfig:
    sizes: dict[str, Any] = dict(decided)
    sharding = zero.sharding
    if PREFETCH_SIZE in sizes:
        residency = sharding.residency._replace(prefetch=sizes.pop(PREFETCH_SIZE))
        sharding = dataclasses.replace(sharding, residency=residency)
    return dataclasses.replace(zero, **sizes, sharding=sharding, open_sizes=())
