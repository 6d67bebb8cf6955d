"""Publishes DeepSpeed's expert layers (MoE), and how many tokens chose each expert in each forward pass.

The gate stores the numbers of tokens on the layer (``exp_counts``). The capacity is a dimension of the input of
the experts. So the capacity is known without another synchronization, whether tokens are dropped or not.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as distributed

from commprof import hooks
from commprof.recorder.adapters.patching import Patches
from commprof.schema import Purpose

_GATES: Final = "deepspeed.moe.sharded_moe"
_EXPERTS: Final = "deepspeed.moe.experts"
EXPERT_MODULES: Final = frozenset({_GATES, _EXPERTS})
_INNER: Final = ".deepspeed_moe"  # the name of the layer within its MoE module
_MODULE: Final = "commprof_module"  # attribute of the context of an autograd function

Call = Callable[..., Any]


class Expert(NamedTuple):
    """The name of an expert's parameter in records, and the size of the expert-parallel group."""

    name: str  # contains the number of the expert among the experts of all ranks
    ep_size: int


class _Thread(threading.local):
    capacity: int | None = None  # of the layer that runs in this thread


class ExpertLayers:
    """Wraps the methods of expert layers.

    Args:
        on_fault: A function that is called with each exception of the recorder's own code.
    """

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        self._on_fault = on_fault
        self._tags: weakref.WeakKeyDictionary[Any, hooks.tag] = weakref.WeakKeyDictionary()
        self._thread = _Thread()

    def wrap(self, module: ModuleType, patches: Patches) -> list[str]:
        """Wrap the methods in ``module``, and return the paths of expected methods that this version lacks."""
        wrappers: dict[str, dict[str, Callable[[Call], Call]]] = {
            _GATES: {
                "MOELayer.forward": self._layer,
                "_AllToAll.forward": _exchange,
                "_AllToAll.backward": _returned,
            },
            _EXPERTS: {"Experts.forward": self._experts},
        }
        return [
            path
            for path, wrap in wrappers.get(module.__name__, {}).items()
            if not patches.wrap(module, path, wrap)
        ]

    def publish(self, model: torch.nn.Module) -> dict[int, Expert]:
        """Publish the expert layers of ``model``, and return the parameters of its experts by their ``id``."""
        layers = [(name, each) for name, each in model.named_modules() if _is_layer(each)]
        for name, layer in layers:
            self._tags[layer] = hooks.tag(Purpose.ACTIVATION.value, module=name.removesuffix(_INNER))
        hooks.describe_expert_layers(_row(name.removesuffix(_INNER), layer) for name, layer in layers)
        return {key: expert for name, layer in layers for key, expert in _parameters(name, layer)}

    def _layer(self, original: Call) -> Call:
        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            tag = self._tags.get(layer)
            if tag is None:  # the layer belongs to no engine
                return original(layer, *args, **kwargs)
            outer, self._thread.capacity = self._thread.capacity, None
            try:
                with tag:
                    return original(layer, *args, **kwargs)
            finally:
                # Activation checkpointing may end a recomputed pass with an exception, once it has the tensors.
                self._publish_load(layer, tag, args)
                self._thread.capacity = outer

        return forward

    def _publish_load(self, layer: Any, tag: hooks.tag, args: tuple[Any, ...]) -> None:
        try:
            capacity = self._thread.capacity
            if capacity is not None and tag.module is not None:
                hidden = args[0].shape[-1]
                # The counts are floats if the mask of used tokens has a floating-point dtype.
                counts = layer.exp_counts.long()
                hooks.expert_load(tag.module, counts, capacity, args[0].numel() // hidden)
        except Exception as error:
            self._on_fault(error)

    def _experts(self, original: Call) -> Call:
        def forward(experts: Any, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            shape = inputs.shape  # ranks, experts of this rank, capacity, elements of a token
            self._thread.capacity = shape[2] if len(shape) == 4 else None
            return original(experts, inputs, *args, **kwargs)

        return forward


def _is_layer(module: torch.nn.Module) -> bool:
    return any(f"{kind.__module__}.{kind.__name__}" == f"{_GATES}.MOELayer" for kind in type(module).__mro__)


def _exchange(original: Call) -> Call:
    """Wrap the forward exchange of tokens so that it stores its tag for the backward pass.

    The backward pass runs in a thread of autograd, in which the tag is not open.
    """

    def forward(context: Any, *args: Any, **kwargs: Any) -> Any:
        tag = hooks.current_tag()
        if tag is not None and tag.module is not None:
            setattr(context, _MODULE, tag)
        return original(context, *args, **kwargs)

    return forward


def _returned(original: Call) -> Call:
    def backward(context: Any, *args: Any, **kwargs: Any) -> Any:
        tag = getattr(context, _MODULE, None)
        if tag is None:
            return original(context, *args, **kwargs)
        with tag:
            return original(context, *args, **kwargs)

    return backward


def _ranks(layer: Any) -> list[int]:
    """Return the global ranks that share the experts of ``layer``, in the order of their group."""
    group = layer.ep_group
    return [distributed.get_rank()] if group is None else list(distributed.get_process_group_ranks(group))


def _row(name: str, layer: Any) -> dict[str, Any]:
    gate = layer.gate
    return {
        "layer": name,
        "num_experts": int(layer.ep_size) * int(layer.num_local_experts),
        "ep_size": int(layer.ep_size),
        "k": int(gate.k),
        "capacity_factor": float(gate.capacity_factor),
        "eval_capacity_factor": float(gate.eval_capacity_factor),
        "min_capacity": int(gate.min_capacity),
        "drop_tokens": bool(gate.drop_tokens),
        "hidden": int(gate.wg.weight.shape[1]),
        "expert_ranks": ",".join(map(str, _ranks(layer))),
    }


def _parameters(name: str, layer: Any) -> Iterator[tuple[int, Expert]]:
    experts = layer.experts.deepspeed_experts
    first = _ranks(layer).index(distributed.get_rank()) * len(experts)
    for number, expert in enumerate(experts, first):
        for rest, parameter in expert.named_parameters():
            path = f"{name}.experts.deepspeed_experts.{number}.{rest}"
            yield id(parameter), Expert(path, int(layer.ep_size))
