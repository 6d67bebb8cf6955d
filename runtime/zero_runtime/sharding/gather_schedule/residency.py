"""Residency of sharded parameters: they are gathered before a module uses them, and released afterwards (stage 3).

The calls during the life of a model under stage 3::

    residency = Residency(module, group, policy)
    residency.shard()        # shards every parameter that zero.Init has not sharded already
    ...                      # the optimizer takes shard_of(parameter).own of each parameter
    residency.install()      # adds hooks; sends the messages of DeepSpeed's start
    ... forward              # the hooks gather and release
    ... backward             # the gradient of a parameter is accumulated while it is gathered
    residency.finish_backward()       # after each backward pass
    residency.release_all()           # at the start of a step: releases every parameter
    ...                      # the optimizer writes shard_of(parameter).own
    residency.parameters_changed()    # gathers the persistent parameters again
    residency.shut_down()    # leaves stage 3: removes hooks, gathers parameters and makes them ordinary
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime import comm, log
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError
from zero_runtime.sharding.gather_schedule import leaves, outside_access
from zero_runtime.sharding.gather_schedule.block_iteration import Block, BlockIteration
from zero_runtime.sharding.gather_schedule.gather_units import Unit, units_of, watch_inputs
from zero_runtime.sharding.gather_schedule.gathered_blocks import blocks_of, gathers_by_block
from zero_runtime.sharding.gather_schedule.iteration import Iteration
from zero_runtime.sharding.gather_schedule.module_order import Limits
from zero_runtime.sharding.gather_schedule.policy import ResidencyPolicy, gather_group, secondary_group
from zero_runtime.sharding.message_memory import MessageMemory
from zero_runtime.sharding.parameter_gathering import ACCESS, Gatherer, broadcast
from zero_runtime.sharding.placement.shard_storage import SliceStorage
from zero_runtime.sharding.shards import Shard, shard_of, shards_of

_ATTRIBUTE: Final = "zero_residency"


class Residency:
    """Gathers the parameters of one model before their use and releases them after.

    Args:
        module: The model.
        group: The data-parallel ranks.
        policy: The rules by which parameters are gathered and released.
        dtypes: The communication dtype of the parameters for which it differs from their own dtype (autocast).
        unpartitioned: The parameters that always persist. Parameters may be added later.

    Attributes:
        memory: The memory of the messages of blocks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: DataParallelGroup,
        policy: ResidencyPolicy,
        dtypes: Mapping[torch.nn.Parameter, torch.dtype] | None = None,
        unpartitioned: Collection[torch.nn.Parameter] = (),
    ) -> None:
        self._unpartitioned = unpartitioned
        self._module = module
        self._group = group
        self._policy = policy
        numels = {name: _numel(parameter) for name, parameter in module.named_parameters()}
        by_block = gathers_by_block(policy.unit, numels, policy.max_live)
        secondary = secondary_group(group, policy.secondary_size)
        gathering = gather_group(group) if by_block else None
        self.own_groups = tuple(each for each in (secondary, gathering) if each is not None)
        self.memory = MessageMemory()
        self._gatherer = Gatherer(
            policy.sequential,
            policy.by_all_reduce,
            secondary,
            dtypes,
            policy.quantizes,
            group=gathering,
            memory=self.memory if by_block else None,
        )
        prefetch = min(policy.prefetch, 1) if policy.sequential else policy.prefetch
        limits = Limits(prefetch, policy.reuse_distance, policy.max_live)
        kind = BlockIteration if by_block else Iteration
        self._iteration = kind(group, self._gatherer, limits, policy.report_trace)
        self._storage = SliceStorage(policy.offload, group.device, comm.get_rank(), by_block)
        self._handles: list[Any] = []
        # Leaf modules that were flagged because of the policy's granularity.
        self._flagged: list[torch.nn.Module] = []

    def listen(self, listener: Callable[[torch.nn.Module], None]) -> None:
        """Call ``listener`` with each module whose backward pass has ended, if its inputs are differentiable."""
        self._iteration.listener = listener

    @torch.no_grad()
    def shard(self) -> None:
        """Shard every parameter that is not sharded yet, with one broadcast from rank 0 for each parameter."""
        self._flag_leaves()
        storage, persistent = self._storage, 0
        for name, parameter in self._module.named_parameters():
            shard = shard_of(parameter)
            if torch.nn.parameter.is_lazy(parameter):
                raise ConfigError(
                    f"{name} has no shape yet (a lazy module); run the model on one batch before initialize"
                )
            if shard is None:
                broadcast(parameter, self._group)
                shard = Shard(parameter, self._group, storage.place)
                self._gatherer.keep_secondary(shard)
                shard.release()
            else:
                if shard.group.group is self._group.group:
                    shard.group = self._group  # the group of zero.Init does not have the configuration
                if shard.dtype != parameter.dtype:
                    shard.cast(parameter.dtype)
            shard.name = name
            if parameter in self._unpartitioned:
                shard.persistent = True
            else:
                shard.persistent = self._persists(shard, persistent)
                persistent += shard.numel if shard.persistent else 0
            storage.keep(shard)
            self._iteration.add(shard)
        if storage.pager is not None:
            storage.pager.ahead = min(self._policy.prefetch, self._policy.max_live) // self._group.world_size
        self._iteration.pager = storage.pager
        if isinstance(self._iteration, BlockIteration):
            self._iteration.divide(self.blocks)
        storage.report(self._iteration.shards.values())

    def _flag_leaves(self) -> None:
        """Flag leaf modules.

        Modules that the policy names are flagged permanently, and small modules until :meth:`shut_down`.
        """
        policy = self._policy
        leaves.flag_configured(self._module, policy.leaf_classes, policy.leaf_names, policy.leaf_suffixes)
        before = set(leaves.get_z3_leaf_modules(self._module))
        fine = leaves.flag_fine(self._module, policy.granularity) if policy.granularity > 0 else []
        if policy.granularity > 0 and not fine and self._group.rank == 0:
            log.warning(
                f"stage3_module_granularity_threshold is {policy.granularity}, and every module has more "
                "elements per layer, so it makes no module a leaf module; raise or remove it"
            )
        self._flagged = [module for module in fine if module not in before]

    @property
    def blocks(self) -> list[Block]:
        """The blocks that are gathered by one message each; empty if modules are gathered.

        Unpartitioned parameters are not in a block.
        """
        if not isinstance(self._iteration, BlockIteration):
            return []
        partitioned = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if parameter not in self._unpartitioned
        }
        return [
            Block(name, shards_of(partitioned[each] for each in members))
            for name, members in blocks_of(partitioned).items()
        ]

    def _persists(self, shard: Shard, before: int) -> bool:
        """Return whether a parameter persists.

        A parameter persists if it is small, and if it fits after ``before`` persistent elements.
        """
        if isinstance(self._iteration, BlockIteration):
            return False
        fits = before + shard.numel <= self._policy.model_persistence
        return fits and shard.numel <= self._policy.persistence

    def install(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Add hooks to the modules, and send DeepSpeed's start messages: 3 barriers, 1 all_gather for each parameter.

        Args:
            parameters: The trainable parameters, in the order of the optimizer. Default: in the order of the
                model.
        """
        for _ in range(3):
            self._group.barrier()
        for parameter in self._module.parameters() if parameters is None else parameters:
            shard = shard_of(parameter)
            if shard is not None and parameter.requires_grad:
                self._gatherer.gather_each([shard])
                self._iteration.release(shard)
        unpartitioned = (
            shard_of(parameter) for parameter in self._module.parameters() if parameter in self._unpartitioned
        )
        self._gatherer.gather_each([shard for shard in unpartitioned if shard is not None])
        self._hook()
        setattr(self._module, _ATTRIBUTE, self)

    def extend(self) -> None:
        """Shard the parameters that were added to the model.

        The hooks are added again, and the order of modules is recorded again.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._module.modules():
            outside_access.unwatch(module)
        self._iteration.restart()
        self.shard()
        self._hook()

    def _hook(self) -> None:
        for parameter in self._module.parameters():
            shard = shard_of(parameter)
            if shard is not None and parameter.requires_grad:
                self._handles.append(
                    parameter.register_hook(partial(_before_gradient, self._iteration, shard))
                )
        units = units_of(self._module, self._iteration)
        self._handles.append(
            self._module.register_forward_pre_hook(lambda module, inputs: self._iteration.begin(units))
        )
        for unit in units:
            self._add_hooks(unit)
        for module in self._module.modules():
            outside_access.watch(module)

    def _add_hooks(self, unit: Unit) -> None:
        iteration = self._iteration

        def before(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
            iteration.before_forward(unit)
            # Inputs are watched for every module, as in DeepSpeed. Otherwise external parameters of one step would
            # change the order of the next step.
            return watch_inputs(unit, inputs) if torch.is_grad_enabled() else None

        def after(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            return iteration.after_forward(unit, output)

        self._handles.append(unit.module.register_forward_pre_hook(before))
        self._handles.append(unit.module.register_forward_hook(after, always_call=True))

    def gather(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Gather ``parameters`` by number, with one all_gather for each.

        Gathered and unsharded parameters are skipped.
        """
        self._gatherer.gather_each(shards_of(parameters))

    def release(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Release ``parameters``, unless a module is using them."""
        for shard in shards_of(parameters):
            self._iteration.release(shard)

    def finish_backward(self) -> None:
        """Release the parameters of modules without differentiable inputs.

        Call this method after each backward pass.
        """
        self._iteration.finish_backward()

    @torch.no_grad()
    def release_all(self) -> None:
        """Release every parameter, including persistent parameters, at the start of a step."""
        self._iteration.stop()

    def parameters_changed(self) -> None:
        """Gather the persistent parameters again after the optimizer has written the shards.

        There is one all_gather for each parameter.

        This method is not called when a step is skipped. The next forward pass then gathers the parameters.
        """
        self.release_all()
        for shard in self._iteration.shards.values():
            if shard.parameter.requires_grad:
                shard.secondary = None
        self.gather_persistent()
        self._iteration.anticipate()

    def publish_released(self, metric: str, *, always: bool = False) -> None:
        """Publish the released share of the elements of persistent parameters.

        A share of 0 is published only if ``always``.
        """
        if not hooks.recording():
            return
        persistent = [shard for shard in self._iteration.shards.values() if shard.persistent]
        released = sum(shard.numel for shard in persistent if not shard.available)
        if persistent and (released or always):
            hooks.metric(metric, released / sum(shard.numel for shard in persistent))

    @torch.no_grad()
    def gather_persistent(self) -> None:
        """Gather the persistent parameters that are released, with one all_gather for each."""
        named = (shard_of(parameter) for parameter in self._module.parameters())
        self._gatherer.gather_each([shard for shard in named if shard is not None and shard.persistent])

    def shut_down(self) -> None:
        """Remove the hooks, gather every parameter, and make the parameters ordinary parameters again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.release_all()
        for module in self._module.modules():
            outside_access.unwatch(module)
        for module in self._flagged:
            leaves.set_z3_leaf_module(module, False)
        make_whole(self._module.parameters())
        self._iteration.shards.clear()
        if residency_of(self._module) is self:
            delattr(self._module, _ATTRIBUTE)


def _numel(parameter: torch.nn.Parameter) -> int:
    """Return the number of elements of a parameter, sharded or not; 0 for a lazy parameter."""
    shard = shard_of(parameter)
    if shard is not None:
        return shard.numel
    return 0 if torch.nn.parameter.is_lazy(parameter) else parameter.numel()


def _before_gradient(iteration: Iteration, shard: Shard, gradient: torch.Tensor) -> None:
    iteration.before_gradient(shard)


def residency_of(module: torch.nn.Module) -> Residency | None:
    """Return the installed residency of a model, or None."""
    residency = module.__dict__.get(_ATTRIBUTE)
    return residency if isinstance(residency, Residency) else None


def make_whole(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Gather sharded parameters, with one all_gather for each, and make them ordinary parameters."""
    shards = shards_of(parameters)
    Gatherer(why=ACCESS).gather_each(shards)
    for shard in shards:
        if shard.parameter.untyped_storage().nbytes() != shard.numel * shard.dtype.itemsize or (
            shard.group.world_size == 1
        ):
            # The parameter shares its memory with padding or with the shard.
            shard.parameter.data = shard.parameter.detach().clone()
        shard.detach()
