"""FSDP 1 (``FullyShardedDataParallel``): the module that its collectives are for, and the parameters that travel."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from commprof import hooks
from commprof.recorder.adapters.checkpoints import Checkpoints
from commprof.recorder.adapters.flushes import Numbers, open_bucket
from commprof.recorder.adapters.fully_shard import ROOT
from commprof.recorder.adapters.parts import Doubts, Part, purpose
from commprof.recorder.journal import Journal
from commprof.recorder.models import plain_name
from commprof.schema import Purpose

_CLASS_MODULE: Final = "torch.distributed.fsdp.fully_sharded_data_parallel"
_CLASS: Final = "FullyShardedDataParallel"
_FLAT: Final = "torch.distributed.fsdp._flat_param"
_ORDER: Final = "torch.distributed.fsdp._exec_order_utils"
_STATE: Final = "torch.distributed.fsdp._state_dict_utils"
# What torch calls around state_dict and load_state_dict of a module in shards.
_STATE_HOOKS: Final = tuple(
    f"_{kind}_{when}"
    for kind in ("full", "sharded", "local")
    for when in ("pre", "post", "pre_load", "post_load")
)
_RUNTIME: Final = "torch.distributed.fsdp._runtime_utils"
_GATHER: Final = hooks.tag(Purpose.PARAMETER_GATHER.value)
_REDUCE: Final = hooks.tag(Purpose.GRADIENT_REDUCE.value)

_PURPOSES: Final = (
    purpose("torch.distributed.fsdp._init_utils", "_sync_params_and_buffers", Purpose.PARAMETER_BROADCAST),
    purpose(_CLASS_MODULE, f"{_CLASS}.clip_grad_norm_", Purpose.GRADIENT_NORM),
    purpose(_CLASS_MODULE, f"{_CLASS}.optim_state_dict", Purpose.CHECKPOINT),
    purpose(_CLASS_MODULE, f"{_CLASS}.optim_state_dict_to_load", Purpose.CHECKPOINT),
    purpose(_FLAT, "FlatParamHandle.unshard_grad", Purpose.OTHER),
    # Whether all ranks gather the parameters in one order.
    purpose(_ORDER, "_ExecOrderData._check_order", Purpose.TRACE_CHECK, optional=True),
)


class Fsdp:
    """What is known of the modules that FullyShardedDataParallel wraps."""

    def __init__(self, journal: Journal, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._doubt = Doubts(journal, "FSDP 1")
        self._numbers = Numbers()
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._gathers: weakref.WeakKeyDictionary[Any, hooks.tag] = weakref.WeakKeyDictionary()

    def parts(self) -> list[Part]:
        """What to wrap."""
        return [
            *_PURPOSES,
            *(self._checkpoints.part(_STATE, f"{name}_state_dict_hook") for name in _STATE_HOOKS),
            Part(_CLASS_MODULE, f"{_CLASS}.__init__", self._wrap_construction),
            Part(_FLAT, "FlatParamHandle.unshard", self._wrap_unshard),
            Part(_RUNTIME, "_reduce_grad", self._wrap_reduce),
            Part(_RUNTIME, "_reduce_grad_no_shard", self._wrap_reduce),
        ]

    def _wrap_construction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def construct(wrapper: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            original(wrapper, *args, **kwargs)
            try:
                # The outermost is made last, and its names are those of the model.
                for name, module in wrapper.named_modules():
                    self._modules[module] = plain_name(name)
                self._gathers.clear()
            except Exception as error:
                self._doubt(error)

        return construct

    def _place(self, handle: Any) -> tuple[str, tuple[str, ...]]:
        """The module of ``handle`` and the names of its parameters."""
        module = self._modules.get(handle._fully_sharded_module, "")
        prefix = f"{module}." if module else ""
        return module or ROOT, tuple(prefix + plain_name(name) for name in handle.flat_param._fqns)

    def _wrap_unshard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unshard(handle: Any, *args: Any, **kwargs: Any) -> Any:
            with self._gather_of(handle):
                return original(handle, *args, **kwargs)

        return unshard

    def _gather_of(self, handle: Any) -> hooks.tag:
        outer = hooks.current_tag()
        if outer is not None and outer.purpose == Purpose.CHECKPOINT:
            return outer
        tag = self._gathers.get(handle)
        if tag is None:
            try:
                module, names = self._place(handle)
                tag = hooks.tag(Purpose.PARAMETER_GATHER.value, parameters=names, module=module)
                self._gathers[handle] = tag
            except Exception as error:
                self._doubt(error)
                tag = _GATHER
        return tag

    def _wrap_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                tag = self._bucket(handle)
            except Exception as error:
                self._doubt(error)
                tag = _REDUCE
            with tag:
                return original(state, handle, *args, **kwargs)

        return reduce

    def _bucket(self, handle: Any) -> hooks.tag:
        module, names = self._place(handle)
        gradient = handle.flat_param.grad
        numel = gradient.numel()
        # Cut into equal parts where it is sharded at all.
        parts = handle.world_size if handle.uses_sharded_strategy else 1
        nbytes = -(-numel // parts) * parts * gradient.dtype.itemsize
        return open_bucket(self._numbers.take(), numel, nbytes, gradient.dtype, names, module=module)
