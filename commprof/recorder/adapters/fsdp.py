"""Adapter for FSDP 1 (``FullyShardedDataParallel``): tags each collective with its module and parameters."""

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
from commprof.recorder.process.journal import Journal
from commprof.recorder.training.published_models import plain_name
from commprof.recorder.training.wrapped import Wrapped, WrappedModels
from commprof.schema import Purpose

_CLASS_MODULE: Final = "torch.distributed.fsdp.fully_sharded_data_parallel"
_CLASS: Final = "FullyShardedDataParallel"
_FLAT: Final = "torch.distributed.fsdp._flat_param"
_ORDER: Final = "torch.distributed.fsdp._exec_order_utils"
_STATE: Final = "torch.distributed.fsdp._state_dict_utils"
# Name prefixes of the hooks that torch calls before and after state_dict and load_state_dict of a sharded module.
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
    # This checks that all ranks gather the parameters in the same order.
    purpose(_ORDER, "_ExecOrderData._check_order", Purpose.TRACE_CHECK, optional=True),
)


class Fsdp:
    """Tracks the modules that FullyShardedDataParallel wraps."""

    def __init__(self, journal: Journal, checkpoints: Checkpoints, wrapped: WrappedModels) -> None:
        self._wrapped = wrapped
        self._places: weakref.WeakKeyDictionary[Any, tuple[Wrapped, int]] = weakref.WeakKeyDictionary()
        self._checkpoints = checkpoints
        self._doubt = Doubts(journal, "FSDP 1")
        self._numbers = Numbers()
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._gathers: weakref.WeakKeyDictionary[Any, hooks.tag] = weakref.WeakKeyDictionary()

    def parts(self) -> list[Part]:
        """Return the functions to wrap, each with its wrapper."""
        return [
            *_PURPOSES,
            *(self._checkpoints.part(_STATE, f"{name}_state_dict_hook") for name in _STATE_HOOKS),
            Part(_CLASS_MODULE, f"{_CLASS}.__init__", self._wrap_construction),
            Part(_FLAT, "FlatParamHandle.unshard", self._wrap_unshard),
            Part(_FLAT, "FlatParamHandle.reshard", self._wrap_reshard),
            Part(_CLASS_MODULE, "_pre_forward_unshard", self._wrap_pass("F")),
            Part(_RUNTIME, "_pre_backward_hook", self._wrap_pre_backward),
            Part(_RUNTIME, "_post_backward_reshard", self._wrap_post_backward),
            Part(_RUNTIME, "_post_backward_final_callback", self._wrap_end),
            Part(_RUNTIME, "_share_state_and_init_handle_attrs", self._wrap_first_forward),
            Part(_CLASS_MODULE, f"{_CLASS}.clip_grad_norm_", self._wrap_clip),
            Part(_RUNTIME, "_reduce_grad", self._wrap_reduce),
            Part(_RUNTIME, "_reduce_grad_no_shard", self._wrap_reduce),
        ]

    def _wrap_construction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def construct(wrapper: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            original(wrapper, *args, **kwargs)
            try:
                # The outermost wrapper is constructed last, and its names are the names within the model.
                for name, module in wrapper.named_modules():
                    self._modules[module] = plain_name(name)
                self._gathers.clear()
            except Exception as error:
                self._doubt(error)

        return construct

    def _place(self, handle: Any) -> tuple[str, tuple[str, ...]]:
        """Return the module of ``handle`` and the names of its parameters."""
        module = self._modules.get(handle._fully_sharded_module, "")
        prefix = f"{module}." if module else ""
        return module or ROOT, tuple(prefix + plain_name(name) for name in handle.flat_param._fqns)

    def _wrap_unshard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unshard(handle: Any, *args: Any, **kwargs: Any) -> Any:
            tag = self._gather_of(handle)
            if _is_summoned(handle) and tag.purpose == Purpose.PARAMETER_GATHER:
                self._ran("u", handle)
            with tag:
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
            self._ran("B", handle)
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
        # A sharded gradient is padded so that all shards have the same size.
        shards = handle.world_size if handle.uses_sharded_strategy else 1
        nbytes = -(-numel // shards) * shards * gradient.dtype.itemsize
        return open_bucket(self._numbers.take(), numel, nbytes, gradient.dtype, names, module=module)

    # The arguments and passes of each model.

    def _ran(self, kind: str, handle: Any) -> None:
        try:
            known = self._places.get(handle) if handle is not None else None
            if known is not None:
                known[0].ran(f"{kind}{known[1]}")
        except Exception as error:
            self._doubt(error)

    def _wrap_pass(self, kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
                self._ran(kind, handle)
                return original(state, handle, *args, **kwargs)

            return run

        return wrap

    def _wrap_pre_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def pre_backward(state: Any, module: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
            needed = getattr(handle, "_needs_pre_backward_unshard", False)
            if needed and not getattr(handle, "_ran_pre_backward_hook", False):
                self._ran("p", handle)
            return original(state, module, handle, *args, **kwargs)

        return pre_backward

    def _wrap_post_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def post_backward(state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
            self._ran("b" if getattr(state, "_sync_gradients", True) else "k", handle)
            return original(state, handle, *args, **kwargs)

        return post_backward

    def _wrap_reshard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reshard(handle: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_summoned(handle) and (args[:1] == (True,) or kwargs.get("free_unsharded_flat_param")):
                self._ran("r", handle)
            return original(handle, *args, **kwargs)

        return reshard

    def _wrap_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def end(state: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(state, *args, **kwargs)
            self._ran_by(state, "E" if getattr(state, "_sync_gradients", True) else "e")
            return result

        return end

    def _wrap_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            self._ran_by(wrapper, "N")
            return original(wrapper, *args, **kwargs)

        return clip

    def _ran_by(self, state: Any, kind: str) -> None:
        """Report a pass of the whole model whose root is ``state``, through the first unit of the model."""
        handles = getattr(state, "_all_handles", None) or ()
        self._ran(kind, handles[0] if handles else None)

    def _wrap_first_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def first_forward(root: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(root, *args, **kwargs)
            try:
                self._publish(root)
            except Exception as error:
                self._doubt(error)
            return result

        return first_forward

    def _publish(self, root: Any) -> None:
        model = self._wrapped.next_number
        first: Wrapped | None = None
        states = {id(each._handle): each for each in root._all_fsdp_states if each._handle is not None}
        for number, handle in enumerate(root._all_handles):
            state = states.get(id(handle), root)
            strategy = handle._sharding_strategy.name
            flat = handle.flat_param
            trained = [each.requires_grad for each in flat._params or ()] or [flat.requires_grad] * len(
                flat._fqns
            )
            parameters = [
                (name, list(shape), _dtype(handle._orig_param_dtype), is_trained)
                for name, shape, is_trained in zip(flat._fqns, flat._shapes, trained, strict=False)
            ]
            arguments = {
                "model": model,
                "root": handle is root._handle,
                "sharding_strategy": "HYBRID_SHARD_ZERO2" if strategy == "_HYBRID_SHARD_ZERO2" else strategy,
                "param_dtype": _dtype(handle._fwd_bwd_param_dtype),
                "reduce_dtype": _dtype(handle._reduce_dtype),
                "use_orig_params": bool(handle._use_orig_params),
                "comm_hook": getattr(state._comm_hook, "__qualname__", None),
            }
            replicas = getattr(state, "_inter_node_pg", None) if "HYBRID" in strategy else None
            unit = self._place(handle)[0]
            wrapped = self._wrapped.add(
                "fsdp", unit, handle.process_group, arguments, parameters, replicas=replicas
            )
            first = first or wrapped
            self._places[handle] = first, number


def _is_summoned(handle: Any) -> bool:
    """Return whether the program itself requests whole parameters (``summon_full_params``, a state dict)."""
    return getattr(handle._training_state, "name", "") == "SUMMON_FULL_PARAMS"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
