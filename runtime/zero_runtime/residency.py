"""When sharded parameters are whole: gathered before a module uses them, released after (stage 3).

The life of a model under stage 3, in order::

    residency = Residency(module, group, policy)
    residency.shard()        # cuts every parameter; those that zero.Init has cut already stay as they are
    ...                      # the optimizer takes shard_of(parameter).own of each parameter
    residency.install()      # hooks; the messages of DeepSpeed's start
    ... forward              # the hooks gather and release
    ... backward             # gradients of a parameter come while it is whole
    residency.finish_backward()       # after each backward pass
    residency.release_all()           # first thing in a step: every parameter is its slices again
    ...                      # the optimizer writes shard_of(parameter).own
    residency.parameters_changed()    # gathers the persistent ones again
    residency.shut_down()    # only to leave stage 3: no hooks, parameters whole and ordinary again
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime import access, comm, leaves
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError, UnsupportedError, UsageError
from zero_runtime.gathering import Gatherer, broadcast
from zero_runtime.shards import Shard, Status, shard_of, shards_of
from zero_runtime.trace import Limits, Planner
from zero_runtime.units import Unit, tensors_in, units_of, watch_inputs, watch_output

_TRACE_CHECK: Final = hooks.tag("trace_check")
_ATTRIBUTE: Final = "zero_residency"


class ResidencyPolicy(NamedTuple):
    """When parameters are gathered and released. Sizes are elements; the defaults are DeepSpeed's.

    Attributes:
        prefetch: gather at most about this much ahead of its use; 0 for never.
        reuse_distance: keep what is used again within this many elements.
        max_live: gather ahead only while less than this is whole.
        persistence: parameters of at most this many elements stay whole.
        model_persistence: at most this many elements stay whole.
        sequential: one message for each parameter.
        by_all_reduce: gather several parameters by an all_reduce of their padded whole.
        secondary_size: ranks that share out a second, larger slice (hpZ); 1 for none.
        leaf_classes, leaf_names, leaf_suffixes: modules that are gathered as one, children included.
        granularity: modules of fewer elements per layer than this are gathered as one; 0 for none.
        report_trace: say on stderr when the recorded order of modules no longer holds.
        remote_device: where slices are kept; None for the parameters' device.
    """

    prefetch: int = 50_000_000
    reuse_distance: int = 1_000_000_000
    max_live: int = 1_000_000_000
    persistence: int = 100_000
    model_persistence: int = 2**63 - 1
    sequential: bool = False
    by_all_reduce: bool = False
    secondary_size: int = 1
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()
    granularity: int = 0
    report_trace: bool = False
    remote_device: str | None = None


class Residency:
    """Gathers the parameters of one model before their use and releases them after.

    Args:
        module: the model.
        group: the data-parallel ranks.
        policy: when parameters are gathered and released.
        dtypes: in which dtype parameters travel, where it is not their own (autocast).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: DataParallelGroup,
        policy: ResidencyPolicy,
        dtypes: Mapping[torch.nn.Parameter, torch.dtype] | None = None,
    ) -> None:
        self._module = module
        self._group = group
        self._policy = policy
        secondary = _secondary_group(group, policy.secondary_size)
        self._gatherer = Gatherer(policy.sequential, policy.by_all_reduce, secondary, dtypes)
        self._shards: dict[int, Shard] = {}
        self._numels: dict[int, int] = {}
        prefetch = min(policy.prefetch, 1) if policy.sequential else policy.prefetch
        limits = Limits(prefetch, policy.reuse_distance, policy.max_live)
        self._planner = Planner(limits, self._numels)
        self._inflight: dict[int, Shard] = {}  # gathered, or being gathered, ahead of its use
        self._backward: dict[int, Unit] = {}  # units whose backward pass has begun and not ended
        self._unseen: dict[int, Unit] = {}  # units whose outputs show no tensor to wait for
        self._units: list[Unit] = []
        self._handles: list[Any] = []

    @torch.no_grad()
    def shard(self) -> None:
        """Cut every parameter that is not a shard yet: one broadcast of its elements from rank 0 for each."""
        policy = self._policy
        leaves.flag_configured(self._module, policy.leaf_classes, policy.leaf_names, policy.leaf_suffixes)
        if policy.granularity > 0 and not leaves.flag_fine(self._module, policy.granularity):
            self._report(
                f"no module has {policy.granularity} or fewer elements per layer; there are no leaf modules"
            )
        device = remote(policy.remote_device)
        for name, parameter in self._module.named_parameters():
            shard = shard_of(parameter)
            if torch.nn.parameter.is_lazy(parameter):
                raise ConfigError(
                    f"{name} has no shape yet (a lazy module); run the model on one batch before initialize"
                )
            if shard is None:
                broadcast(parameter, self._group)
                shard = Shard(parameter, self._group, device)
                self._gatherer.keep_secondary(shard)
                shard.release()
            elif shard.dtype != parameter.dtype:
                shard.cast(parameter.dtype)
            shard.name = name
            self._shards[shard.number] = shard
            self._numels[shard.number] = shard.numel
        self._mark_persistent()

    def _mark_persistent(self) -> None:
        """Small parameters, in the order of the model, while there is room for all of one."""
        numel = 0
        for parameter in self._module.parameters():
            shard = shard_of(parameter)
            if shard is None:
                continue
            fits = numel + shard.numel <= self._policy.model_persistence
            shard.persistent = fits and shard.numel <= self._policy.persistence
            numel += shard.numel if shard.persistent else 0

    def install(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Put hooks on the modules, and send what DeepSpeed sends at its start: 3 barriers, 1 all_gather for each parameter.

        Args:
            parameters: the trainable ones, in the order of the optimizer; default: in the model's.
        """
        for _ in range(3):
            self._group.barrier()
        for parameter in self._module.parameters() if parameters is None else parameters:
            shard = shard_of(parameter)
            if shard is not None and parameter.requires_grad:
                self._gatherer.gather_each([shard])
                self._release(shard)
        self._units = units_of(self._module, self)
        self._handles.append(self._module.register_forward_pre_hook(self._begin))
        for unit in self._units:
            self._add_hooks(unit)
        for module in self._module.modules():
            access.watch(module)
        setattr(self._module, _ATTRIBUTE, self)

    def _add_hooks(self, unit: Unit) -> None:
        def before(module: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            self._before_forward(unit)
            return watch_inputs(unit, inputs, keywords) if torch.is_grad_enabled() else None

        def after(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._after_forward(unit, output, torch.is_grad_enabled())

        self._handles.append(unit.module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(unit.module.register_forward_hook(after, always_call=True))

    # The iteration.

    def _begin(self, module: torch.nn.Module, inputs: Any) -> None:
        """The forward pass of the whole model begins."""
        self._drain()
        self._leave_unseen()
        for numbers in self._planner.begin(self._parameters_of):
            self._compare(numbers)

    def _parameters_of(self, number: int) -> list[int]:
        return [shard.number for shard in self._units[number].shards()]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _before_forward(self, unit: Unit) -> None:
        access.running.append(unit)
        self._enter(unit, unit.forward)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _after_forward(self, unit: Unit, output: Any, differentiates: bool) -> None:
        while access.running and access.running.pop() is not unit:
            pass  # of modules that an exception has left
        tensors = list(tensors_in(output))
        self._hand_over(unit, tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                watch_output(unit, tensor)
        if differentiates and not tensors and output is not None:
            self._unseen[unit.forward] = unit
            return
        self._leave(unit, unit.forward)

    def _hand_over(self, unit: Unit, outputs: Sequence[torch.Tensor]) -> None:
        """Parameters that a module returns are used by the module that called it."""
        caller = access.running[-1] if access.running else None
        for shard in shards_of(outputs):
            if isinstance(caller, Unit):
                caller.add_external(shard.parameter)
                shard.active.add(caller.forward)

    def read(self, unit: Unit, shard: Shard) -> None:
        """A module reads, in its forward pass, a parameter that is not whole: from now on one of those it uses."""
        unit.add_external(shard.parameter)
        shard.active.add(unit.forward)
        with torch.inference_mode(False), torch.no_grad():
            self._gatherer.gather_each([shard])

    @torch.inference_mode(False)
    @torch.no_grad()
    def before_backward(self, unit: Unit) -> None:
        """The gradient of an output is there: gather for the backward pass of the module."""
        self._backward.pop(unit.number, None)
        self._backward[unit.number] = unit
        self._enter(unit, unit.backward)

    @torch.inference_mode(False)
    @torch.no_grad()
    def after_backward(self, unit: Unit) -> None:
        """The gradients of all inputs are there: the backward pass of the module has ended."""
        self._backward.pop(unit.number, None)
        self._leave(unit, unit.backward)

    @torch.no_grad()
    def finish_backward(self) -> None:
        """Release what the modules without differentiable inputs have left whole. Call it after each backward pass."""
        for unit in reversed(list(self._backward.values())):
            for shard in unit.shards():
                shard.active.discard(unit.backward)
                if not shard.persistent:
                    self._release(shard)
        self._backward.clear()
        self._leave_unseen()

    def _leave_unseen(self) -> None:
        for unit in self._unseen.values():
            self._leave(unit, unit.forward)
        self._unseen.clear()

    # One module.

    def _enter(self, unit: Unit, use: int) -> None:
        """Gather what ``unit`` needs, wait for it, and begin to gather what comes next."""
        if self._planner.enter(unit.number):
            self._forget(unit)
        shards = unit.shards()
        self._start(shards)
        for shard in shards:
            shard.active.add(use)
            self._inflight.pop(shard.number, None)
            shard.wait()
        ahead = self._planner.ahead([shard.number for shard in shards], self._is_released)
        if ahead is None:
            self._forget(unit)
        elif ahead:
            self._start([self._shards[number] for number in ahead])

    def _leave(self, unit: Unit, use: int) -> None:
        """``unit`` has run: release what nobody needs soon."""
        shards = {shard.number: shard for shard in unit.shards()}
        for shard in shards.values():
            shard.active.discard(use)
        for number in self._planner.releasable(shards, self._is_persistent):
            self._release(shards[number])

    def _is_released(self, number: int) -> bool:
        return self._shards[number].status is Status.NOT_AVAILABLE

    def _is_persistent(self, number: int) -> bool:
        return self._shards[number].persistent

    def _start(self, shards: Sequence[Shard]) -> None:
        missing = [shard for shard in shards if shard.status is Status.NOT_AVAILABLE]
        if missing:
            self._gatherer.start(missing)
            for shard in missing:
                self._planner.live += shard.numel
                self._inflight[shard.number] = shard

    def _release(self, shard: Shard) -> None:
        if shard.available and not shard.active:
            self._gatherer.keep_secondary(shard)
            shard.release()
            self._planner.live -= shard.numel

    def _drain(self) -> None:
        """Wait for what is on its way, and release it unless somebody uses it."""
        for shard in self._inflight.values():
            shard.wait()
            self._release(shard)
        self._inflight.clear()

    def _forget(self, unit: Unit) -> None:
        self._drain()
        if self._policy.report_trace:
            name = next(name for name, module in self._module.named_modules() if module is unit.module)
            self._report(
                f"{name or 'the model'} does not run in the recorded order of modules; recording again"
            )

    def _compare(self, numbers: Sequence[int]) -> None:
        """Make sure that rank 0 has the same ``numbers``. Raises UsageError."""
        for mine in ([len(numbers)], numbers):
            theirs = torch.tensor(mine, dtype=torch.int64, device=self._group.device)
            self._group.broadcast(theirs, 0, why=_TRACE_CHECK)
            if theirs.tolist() != list(mine):
                raise UsageError(
                    f"rank {self._group.rank} ran its modules in another order than rank 0 ({list(mine)[:8]}... against "
                    f"{theirs.tolist()[:8]}...); stage 3 needs one order on all ranks. Flag modules whose children run "
                    "in varying order with set_z3_leaf_modules"
                )

    def _report(self, text: str) -> None:
        if self._group.rank == 0:
            print(f"zero_runtime: {text}", file=sys.stderr, flush=True)

    # Between the iterations.

    def gather(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make ``parameters`` whole, one all_gather each, by number; those that are whole or not sharded stay."""
        self._gatherer.gather_each(shards_of(parameters))

    def release(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make of ``parameters`` slices again, unless a module is using them."""
        for shard in shards_of(parameters):
            self._release(shard)

    @torch.no_grad()
    def release_all(self) -> None:
        """Make of every parameter slices again, persistent ones too: the first thing in a step."""
        self._drain()
        self._backward.clear()
        self._unseen.clear()
        for shard in self._shards.values():
            shard.active.clear()
            self._release(shard)

    def parameters_changed(self) -> None:
        """Gather the persistent parameters again, one all_gather each, after the optimizer has written the slices.

        Not called when a step is skipped: the next forward gathers them.
        """
        self.release_all()
        for shard in self._shards.values():
            if shard.parameter.requires_grad:
                shard.secondary = None
        named = (shard_of(parameter) for parameter in self._module.parameters())
        self._gatherer.gather_each([shard for shard in named if shard is not None and shard.persistent])

    def shut_down(self) -> None:
        """Take the hooks away and make every parameter whole and ordinary again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.release_all()
        for module in self._module.modules():
            access.unwatch(module)
        make_whole(self._module.parameters())
        self._shards.clear()
        if residency_of(self._module) is self:
            delattr(self._module, _ATTRIBUTE)


def residency_of(module: torch.nn.Module) -> Residency | None:
    """The installed residency of a model, or None."""
    found = module.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Residency) else None


def make_whole(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make ordinary parameters of those that are sharded, one all_gather each."""
    shards = shards_of(parameters)
    Gatherer().gather_each(shards)
    for shard in shards:
        # What is gathered may share its memory with the slice, or with padding.
        shard.parameter.data = shard.parameter.detach().clone()
        shard.detach()


def remote(device: str | None) -> torch.device | None:
    """Where slices are kept: None for the parameters' own device.

    Raises:
        UnsupportedError: for a device that holds files.
        ConfigError: for anything that is no device.
    """
    if device in (None, "none"):
        return None
    if device == "nvme":
        raise UnsupportedError("slices of parameters on nvme are not in this version yet; use cpu or none")
    try:
        return torch.device(str(device))
    except RuntimeError as error:
        raise ConfigError(f"{device!r} is no device to keep parameters on; expected cpu or none") from error


def _secondary_group(group: DataParallelGroup, size: int) -> DataParallelGroup | None:
    """The group of this rank among groups of ``size`` consecutive ranks. Every rank must call it."""
    if size <= 1:
        return None
    if group.world_size % size:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {size}, which does not divide the {group.world_size} ranks"
        )
    found = None
    for first in range(0, group.world_size, size):
        made = comm.new_group(group.global_ranks[first : first + size])
        if first <= group.rank < first + size:
            found = DataParallelGroup(made)
    return found
