"""Sharded parameters in scripts (stage 3): construct a sharded model, and read or change whole parameters.

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
    """Shards the parameters of modules that are constructed inside, or of ``module``, immediately.

    Rank 0's values count: each parameter is broadcast when it is constructed. Contexts may be nested. With a config whose
    stage is not 3 the context does nothing, so that the same script runs at every stage.

    Args:
        module: a whole model to shard now; then there is no need to enter the context.
        data_parallel_group: the ranks that the parameters are partitioned over; default: all.
        mem_efficient_linear: accepted; the key ``memory_efficient_linear`` decides.
        remote_device: device of the shards, unless the configuration sets it: ``cpu``, or ``none`` for the device that
            uses the parameters. ``nvme`` needs ``offload_param`` in the configuration.
        pin_memory: page-locked host memory for ``remote_device`` cpu, where there is a GPU.
        config_dict_or_path: the configuration, for dtype, stage and ``offload_param``.
        config: another name of ``config_dict_or_path``.
        enabled: False makes the context do nothing.
        dtype: of the parameters; default: the config's, or else that of their construction.
        mpu: model parallelism, not in this version.

    Raises:
        ConfigError: an argument or the configuration cannot be used.
        UnsupportedError: the argument is not in this version.
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
        """The function that makes tensor factories use the parameters' dtype."""
        return typed_factory


class GatheredParameters:
    """Gathers parameters while the context is active.

    Contexts may be nested, over the same parameters too. Parameters that are not sharded, or already gathered, are not
    affected.

    Args:
        params: a parameter, or several.
        modifier_rank: the rank (of the parameters' group) whose changes every rank gets at the end. With None, changes are
            lost.
        fwd_module: a module whose forward pass uses the parameters without owning them, from now on.
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
        # A library that saves or loads sets its own tag; otherwise the program reads or changes parameters.
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
    """The offload of shards by the configuration, or else by ``remote_device``."""
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
    known = {name: value for name, value in aio.items() if name in AIO}  # initialize refuses the others
    return offload._replace(io=read_aio(key_table.read(AIO, "aio", known)))


def _block(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        block = config.get(name)
        if isinstance(block, Mapping):
            return block
    return {}


def _dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The parameters' dtype by the config; None keeps that of their construction."""
    if not config:
        return None
    half, brain = _block(config, "fp16"), _block(config, "bf16", "bfloat16")
    if half.get("enabled") is True and brain.get("enabled") is True:
        raise ConfigError("fp16 and bf16 are both enabled; enable one")
    if brain.get("enabled") is True:
        return torch.bfloat16
    return torch.float16 if half.get("enabled") is True else None
