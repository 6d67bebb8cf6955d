"""Sharded parameters in scripts (stage 3): the construction of a sharded model, and access to whole parameters.

::

    with zero_runtime.zero.Init(config_dict_or_path="ds.json"):
        model = Model()
    with zero_runtime.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        if rank == 0:
            model.head.weight.zero_()

The names and signatures are DeepSpeed's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime import comm
from zero_runtime import config as configuration
from zero_runtime.comm import DataParallelGroup
from zero_runtime.configuration import all_keys
from zero_runtime.configuration.blocks.offload_block import AIO, read_aio
from zero_runtime.configuration.blocks.offload_param_block import slice_offload_of
from zero_runtime.configuration.reading import key_table
from zero_runtime.errors import ConfigError, UnsupportedError, UsageError
from zero_runtime.sharding.gather_schedule.gathered_blocks import MODULE
from zero_runtime.sharding.gather_schedule.leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from zero_runtime.sharding.gather_schedule.outside_access import (
    register_external_parameter,
    unregister_external_parameter,
)
from zero_runtime.sharding.gather_schedule.policy import SliceOffload
from zero_runtime.sharding.parameter_gathering import ACCESS, Gatherer, broadcast
from zero_runtime.sharding.placement.shard_storage import SliceStorage
from zero_runtime.sharding.sharded_construction import Cutter, Factory, constructing, typed_factory
from zero_runtime.sharding.shards import Shard, shards_of
from zero_runtime.sharding.shards import Status as ZeroParamStatus

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_z3_leaf_modules",
    "register_external_parameter",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

_contexts: Final = itertools.count(1)
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


class Init:
    """A context that shards the parameters of each module constructed within it, or immediately those of ``module``.

    Each parameter is broadcast from rank 0 when it is constructed, so that the values of rank 0 are used.
    Contexts may be nested. If the stage in the configuration is not 3, the context does nothing, so that the
    same script runs at every stage.

    Args:
        module: A whole model to shard immediately. The context then does not have to be entered.
        data_parallel_group: The ranks that the parameters are partitioned over (default: all ranks).
        mem_efficient_linear: This argument has no effect; the key ``memory_efficient_linear`` decides.
        remote_device: The device of the shards, if the configuration does not set the device. It is ``cpu``, or
            ``none`` for the device that uses the parameters. ``nvme`` requires ``offload_param`` in the
            configuration.
        pin_memory: Whether ``remote_device`` cpu uses page-locked host memory, if there is a GPU.
        config_dict_or_path: The configuration, which is read for dtype, stage and ``offload_param``.
        config: Another name of ``config_dict_or_path``.
        enabled: False makes the context do nothing.
        dtype: The dtype of the parameters. The default is the dtype in the configuration, or else the dtype with which
            the parameters are constructed.
        mpu: The model-parallel ranks, which are not supported in this version.

    Raises:
        ConfigError: An argument or the configuration cannot be used.
        UnsupportedError: An argument is not supported in this version.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: comm.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        for name, value in {"mpu": mpu, **others}.items():
            if value is not None and value is not False:
                raise UnsupportedError(f"{name} of zero.Init is not in this version yet; leave it out")
        if dtype is not None and dtype not in _DTYPES:
            raise ConfigError(
                f"dtype of zero.Init is {dtype}; expected one of {', '.join(map(str, _DTYPES))}"
            )
        config_values = _read(config_dict_or_path if config_dict_or_path is not None else config)
        zero = _block(config_values, "zero_optimization")
        self._enabled = enabled and zero.get("stage", 3) == 3
        self._stack = ExitStack()
        if not self._enabled:
            return
        comm.init_distributed()
        self._gathers_in_apply = zero.get("override_module_apply", True)
        group = DataParallelGroup(data_parallel_group)
        storage = SliceStorage(
            _offload(config_values, remote_device, pin_memory),
            group.device,
            comm.get_rank(),
            by_block=zero.get("stage3_gather_unit", MODULE) != MODULE,
        )
        self._cutter = Cutter(group, storage, dtype or _dtype(config_values))
        if module is not None:
            self._cutter.cut(module, recurse=True)

    def __enter__(self) -> Init:
        if self._enabled:
            phase = hooks.position.phase
            hooks.phase("init")
            self._stack.callback(hooks.phase, phase)
            typed = self._typed_factory()
            self._stack.enter_context(constructing(self._cutter, self._gathers_in_apply, typed))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def _typed_factory(self) -> Callable[..., Factory]:
        """Return the function that makes tensor factories use the dtype of the parameters."""
        return typed_factory


class GatheredParameters:
    """A context in which parameters are gathered.

    Contexts may be nested, even for the same parameters. Parameters that are not sharded, or that are already
    gathered, are not affected.

    Args:
        params: One parameter or several parameters.
        modifier_rank: The rank, within the group of the parameters, whose changes are broadcast to every rank when the
            context ends. With None, changes are lost.
        fwd_module: A module whose forward pass uses the parameters without owning them. The parameters stay
            registered with this module after the context ends.
        enabled: False makes the context do nothing.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        parameters = [params] if isinstance(params, torch.Tensor) else list(params)
        self._shards: list[Shard] = shards_of(parameters) if enabled else []
        self._modifier = modifier_rank
        self._gathered: list[Shard] = []
        self._token = -next(_contexts)
        # A library that saves or loads parameters sets its own tag. Without a tag, the script reads or changes them.
        self._why = hooks.current_tag() or ACCESS
        for shard in self._shards:
            if modifier_rank is not None and not 0 <= modifier_rank < shard.group.world_size:
                raise UsageError(
                    f"modifier_rank is {modifier_rank}; expected a rank from 0 to {shard.group.world_size - 1}, or None"
                )
            if fwd_module is not None:
                register_external_parameter(fwd_module, shard.parameter)

    def __enter__(self) -> None:
        self._gathered = [shard for shard in self._shards if shard.status is ZeroParamStatus.NOT_AVAILABLE]
        Gatherer(why=self._why).gather_each(self._shards)
        for shard in self._shards:
            shard.active.add(self._token)

    def __exit__(self, *exception: Any) -> None:
        if self._modifier is not None and exception[0] is None:
            for shard in self._shards:
                broadcast(shard.parameter, shard.group, self._modifier, self._why)
                shard.keep()
        for shard in self._shards:
            shard.active.discard(self._token)
        for shard in self._gathered:
            if shard.available and not shard.active:
                shard.release()


def _read(config: Any) -> Mapping[str, Any]:
    return {} if config is None else all_keys.as_deepspeed_reads(configuration.load(config))


def _offload(config: Mapping[str, Any], remote_device: str | None, pinned: bool) -> SliceOffload:
    """Return the offload of shards in the configuration, or else the offload that ``remote_device`` requests."""
    offload = slice_offload_of(_block(config, "zero_optimization"))
    remote = "none" if remote_device is None else str(remote_device)
    if offload.device == "none" and remote == "nvme":
        raise ConfigError(
            "remote_device of zero.Init is 'nvme', and the configuration has no zero_optimization.offload_param with a "
            "path; pass config_dict_or_path with device nvme and nvme_path in it"
        )
    if remote not in ("none", "cpu", "nvme"):
        raise ConfigError(f"remote_device of zero.Init is {remote_device!r}; expected cpu, nvme or none")
    if offload.device == "none":
        return SliceOffload(remote, pinned=pinned)
    aio = _block(config, "aio")
    known = {name: value for name, value in aio.items() if name in AIO}  # initialize refuses all other keys
    return offload._replace(io=read_aio(key_table.read(AIO, "aio", known)))


def _block(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        block = config.get(name)
        if isinstance(block, Mapping):
            return block
    return {}


def _dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of the parameters in the configuration; None to keep their current dtype."""
    if not config:
        return None
    half, brain = _block(config, "fp16"), _block(config, "bf16", "bfloat16")
    if half.get("enabled") is True and brain.get("enabled") is True:
        raise ConfigError("fp16 and bf16 are both enabled; enable one")
    if brain.get("enabled") is True:
        return torch.bfloat16
    return torch.float16 if half.get("enabled") is True else None
