"""Assembly of stage 3: residency of the parameters, sharded gradients, and an optimizer over sub-groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zero_runtime.comm import DataParallelGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.gradient_reduction.reducer import Leaf, ParameterGroup, Policy, ShardedGradients
from zero_runtime.optimizer_step.dtypes import Precision, communication_dtypes
from zero_runtime.optimizer_step.grouping import shard_groups
from zero_runtime.optimizer_step.partitioned_types import whole_parameters
from zero_runtime.sharding.block_gradients import BlockGradients
from zero_runtime.sharding.gather_schedule.gather_units import reads_backward
from zero_runtime.sharding.gather_schedule.leaves import get_z3_leaf_modules
from zero_runtime.sharding.gather_schedule.residency import Residency
from zero_runtime.sharding.shard_reduction import ShardReduction
from zero_runtime.sharding.sharded_parameters import ShardedParameters
from zero_runtime.sharding.shards import shards_of


class ShardedModel:
    """A model with sharded parameters, and its gradients.

    Args:
        config: The configuration.
        module: The model, on its device and in its dtype. It is equal on all ranks, unless it is already
            sharded.
        param_groups: The param groups of the optimizer; without an optimizer, all parameters in one group.
        kinds: The dtypes.
        group: The data-parallel ranks.
        at_boundary: A function that returns whether the current micro-batch is the last of its step.
        replicas: The number of ranks with different samples, by which gradients are divided.

    Attributes:
        residency: The object that gathers and releases the parameters. Its hooks are not installed yet.
        groups: The trainable parameters, in sub-groups.
        gradients: The object that reduces and accumulates the gradients of these parameters.
        parameters: This rank's shards of these parameters.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        module: torch.nn.Module,
        param_groups: Sequence[dict[str, Any]] | None,
        kinds: Precision,
        group: DataParallelGroup,
        at_boundary: Callable[[], bool],
        replicas: int,
    ) -> None:
        sharding = config.zero.sharding
        dtypes = communication_dtypes(module, kinds, config.precision.autocast_modules)
        lower = {p: dtype for p, dtype in dtypes.items() if dtype is not p.dtype} if kinds.autocast else None
        offload = sharding.residency.offload._replace(io=config.aio)
        self._unpartitioned = whole_parameters(module, config.zero.partitioned_types)
        residency = sharding.residency._replace(offload=offload)
        self.residency = Residency(module, group, residency, lower, self._unpartitioned)
        self.residency.shard()
        self.groups = shard_groups(
            module,
            param_groups or [{"params": list(module.parameters())}],
            sharding.sub_group_size,
            group.world_size,
        )
        self._config, self._module, self._kinds, self._world = config, module, kinds, group.world_size
        self._numbers = _numbers(self.groups)
        policy = Policy(
            stage=config.zero.stage,
            reduce=_reduction(config, self._numbers),
            scaling=config.scaling(replicas),
            limit=config.zero.reduce_bucket_size,
            contiguous=config.zero.contiguous_gradients,
            norm_dtype=torch.float64 if config.zero.offload_optimizer is None else torch.float32,
            overlap=config.zero.overlap_comm,
        )
        rest = (
            self.groups,
            dtypes,
            policy,
            group,
            kinds.accumulation,
            at_boundary,
            _leaves(module, self.groups),
            self._unpartitioned,
        )
        blocks = self._blocks()
        self.gradients = (
            BlockGradients(
                blocks,
                config.zero.reduce_scatter_impl,
                self.residency.memory,
                self._ahead(blocks),
                _unread(module),
                *rest,
            )
            if blocks
            else ShardedGradients(*rest)
        )
        self.residency.listen(self.gradients.leaf_done)
        self.parameters = ShardedParameters(self.groups, self.residency)

    def add(self, number: int, param_group: dict[str, Any]) -> list[ParameterGroup]:
        """Shard and train the parameters of the additional param group ``number``. Return its sub-groups."""
        self._unpartitioned |= whole_parameters(self._module, self._config.zero.partitioned_types)
        self.residency.extend()
        before: list[dict[str, Any]] = [{"params": []} for _ in range(number)]
        groups = shard_groups(
            self._module, [*before, param_group], self._config.zero.sharding.sub_group_size, self._world
        )
        self._numbers.update(_numbers(groups))
        dtypes = communication_dtypes(self._module, self._kinds, self._config.precision.autocast_modules)
        leaves = _leaves(self._module, groups)
        if isinstance(self.gradients, BlockGradients):
            self.gradients.add(groups, dtypes, leaves, self._blocks())
        else:
            self.gradients.add(groups, dtypes, leaves)
        self.parameters.add(groups)
        return groups

    def _ahead(self, blocks: Sequence[Sequence[torch.nn.Parameter]]) -> int | None:
        """Return the number of elements that are gathered ahead in a backward pass.

        None means that all parameters stay gathered after the forward pass.
        """
        numels = [sum(shard.numel for shard in shards_of(block)) for block in blocks]
        limits = self._config.zero.sharding.residency
        # Between two uses of a block there are at most both passes over the whole model.
        if limits.reuse_distance > 2 * sum(numels) and limits.max_live >= sum(numels):
            return None
        return min(limits.prefetch, max(numels))

    def _blocks(self) -> list[list[torch.nn.Parameter]]:
        """Return the parameters of each block that is gathered and reduced by one message."""
        return [[shard.parameter for shard in block.shards] for block in self.residency.blocks]

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The trainable parameters in the order of the groups."""
        return [parameter for each in self.groups for parameter in each.parameters]


def _unread(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the parameters that are not read by the backward pass of any module."""
    reading: set[torch.nn.Parameter] = set()
    others: set[torch.nn.Parameter] = set()
    for each in module.modules():
        (reading if reads_backward(each) else others).update(each.parameters(recurse=False))
    return others - reading


def _reduction(config: RuntimeConfig, numbers: Mapping[str, int]) -> ShardReduction:
    zero = config.zero
    limit = -1
    if zero.gradient_reduction == "all_reduce":
        # Buckets that are larger than the contiguous buffer use a reduce_scatter, unless the configuration names
        # all_reduce.
        limit = 2**63 - 1 if zero.explicit_reduction else zero.reduce_bucket_size
    return ShardReduction(
        numbers,
        limit,
        zero.reduce_scatter_impl,
        zero.sharding.enable_sanity_checks,
        zero.sharding.quantized_gradients,
    )


def _numbers(groups: Sequence[ParameterGroup]) -> dict[str, int]:
    names = {p: name for each in groups for name, p in zip(each.names, each.parameters, strict=True)}
    return {names[shard.parameter]: shard.number for shard in shards_of(names)}


def _leaves(module: torch.nn.Module, groups: Sequence[ParameterGroup]) -> list[Leaf]:
    """Return the leaf modules with their trainable parameters in the order of the groups.

    Outer modules include inner modules.
    """
    trained = [parameter for each in groups for parameter in each.parameters]
    taken: set[torch.nn.Parameter] = set()
    leaves = []
    for leaf in get_z3_leaf_modules(module):
        inside = set(leaf.parameters()) - taken
        taken |= inside
        parameters = tuple(parameter for parameter in trained if parameter in inside)
        if parameters:
            leaves.append(Leaf(leaf, parameters))
    return leaves
