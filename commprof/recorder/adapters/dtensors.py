"""Adapter for DTensor: derives the purpose of a redistribution from its tensor and from the current phase.

A redistribution of a parameter in a forward or backward pass gathers the parameter, and the backward of this
redistribution reduces its gradient. All other redistributions within forward and backward passes are
activations and their gradients. Gradients that are still partial sums when an optimizer steps are reduced
there. A redistribution of a sharded tensor outside of passes and optimizers is an access of the program to the
tensor. The purpose of any other redistribution is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from commprof import hooks
from commprof.recorder.adapters.parts import Part, Wrap, default_purpose, purpose
from commprof.recorder.adapters.patching import tagged
from commprof.schema import Phase, Purpose

_TENSOR: Final = "torch.distributed.tensor"
_API: Final = f"{_TENSOR}._api"
_REDISTRIBUTE: Final = f"{_TENSOR}._redistribute"
_RANDOM: Final = f"{_TENSOR}._random"
_LOSS: Final = f"{_TENSOR}.parallel.loss"
_RING: Final = f"{_TENSOR}.experimental._context_parallel._attention"
_CLIP: Final = "torch.nn.utils.clip_grad"
_UTILS: Final = "torch.nn.utils"
_GATHER: Final = hooks.tag(Purpose.PARAMETER_GATHER.value)
_ACCESS: Final = hooks.tag(Purpose.PARAMETER_ACCESS.value)
_REDUCE: Final = hooks.tag(Purpose.GRADIENT_REDUCE.value)
_ACTIVATION: Final = hooks.tag(Purpose.ACTIVATION.value)
_NORM: Final = hooks.tag(Purpose.GRADIENT_NORM.value)
_BROADCAST: Final = hooks.tag(Purpose.PARAMETER_BROADCAST.value)
_PASSES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD})
_OF_PARAMETER: Final = "_commprof_of_parameter"  # attribute of the context of an autograd function call

_PURPOSES: Final = (
    *(
        default_purpose(_LOSS, name, Purpose.ACTIVATION, optional=True)
        for name in ("_log_softmax", "_nll_loss_forward", "_nll_loss_and_log_softmax_backward")
    ),
    *(
        default_purpose(f"{_TENSOR}._tp_conv", name, Purpose.ACTIVATION, optional=True)
        for name in ("_ring_send_recv_construct", "_ring_send_recv_aggregate")
    ),
    *(
        default_purpose(_RING, name, Purpose.ACTIVATION, optional=True)
        for name in ("_templated_ring_attention", "_templated_ring_attention_backward")
    ),
    purpose(f"{_TENSOR}._collective_utils", "check_tensor_meta", Purpose.TRACE_CHECK, optional=True),
    purpose(_RANDOM, "manual_seed", Purpose.CONTROL, optional=True),
    purpose(_RANDOM, "OffsetBasedRNGTracker.__init__", Purpose.CONTROL, optional=True),
)


class DTensors:
    """Wraps functions of DTensor, and functions that clip gradients, because their result can be a DTensor."""

    def __init__(self) -> None:
        self._norms = WeakTensorKeyDictionary()  # total norms that are not summed over the ranks yet

    def parts(self) -> list[Part]:
        """Return the functions to wrap, each with its wrapper."""
        return [
            *_PURPOSES,
            *(self._clipping(_CLIP, name) for name in ("clip_grad_norm_", "_get_total_norm")),
            # The package re-exports these functions from the module that defines them.
            *(self._clipping(_UTILS, name, True) for name in ("clip_grad_norm_", "get_total_norm")),
            purpose(_CLIP, "_clip_grads_with_norm_", Purpose.GRADIENT_NORM, optional=True),
            purpose(_UTILS, "clip_grads_with_norm_", Purpose.GRADIENT_NORM, optional=True),
            *(
                Part(module, "redistribute_local_tensor", _wrap_redistribution, True)
                for module in (_REDISTRIBUTE, _API, f"{_TENSOR}._dispatch")
            ),
            Part(_REDISTRIBUTE, "Redistribute.forward", _wrap_forward, True),
            Part(_REDISTRIBUTE, "Redistribute.backward", _wrap_backward, True),
            *(
                Part(_API, f"DTensor.{name}", self._wrap_total, True)
                for name in ("full_tensor", "redistribute")
            ),
            # Each of these modules imports the function by name.
            *(
                Part(module, "distribute_tensor", _wrap_distribution, True)
                for module in (_API, _TENSOR, f"{_TENSOR}.parallel.style")
            ),
            *(
                Part(module, name, _wrap_distribution, True)
                for module in (_API, f"{_TENSOR}.placement_types")
                for name in ("mesh_scatter", "mesh_broadcast")
            ),
        ]

    def _clipping(self, module: str, path: str, optional: bool = False) -> Part:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            inner = tagged(original, _NORM)

            def clip(*args: Any, **kwargs: Any) -> Any:
                total = inner(*args, **kwargs)
                if type(total).__name__ == "DTensor":
                    self._norms[total] = True
                return total

            return clip

        return Part(module, path, wrap, optional)

    def _wrap_total(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tagged_call = tagged(original, _NORM)

        def total(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            call = tagged_call if self._norms and tensor in self._norms else original
            return call(tensor, *args, **kwargs)

        return total


def _by(choose: Callable[..., hooks.tag | None]) -> Wrap:
    """Return a function that wraps a call so that it opens the tag that ``choose`` returns for the arguments.

    If a tag is already open, no other tag is opened.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tag = None if hooks.current_tag() is not None else choose(*args)
            if tag is None:
                return original(*args, **kwargs)
            with tag:
                return original(*args, **kwargs)

        return call

    return wrap


def _of_redistribution(local: Any = None, spec: Any = None, *_: Any) -> hooks.tag | None:
    phase = hooks.position.phase
    if phase in _PASSES:
        return _ACTIVATION
    partial = any(placement.is_partial() for placement in getattr(spec, "placements", ()))
    return _REDUCE if partial and phase == Phase.OPTIMIZER else None


def _of_distribution(tensor: Any = None, *_: Any) -> hooks.tag | None:
    phase = hooks.position.phase
    if isinstance(tensor, torch.nn.Parameter) or phase == Phase.INIT:
        return _BROADCAST
    return _ACTIVATION if phase in _PASSES else None


def _of_forward(context: Any = None, tensor: Any = None, *_: Any) -> hooks.tag | None:
    phase = hooks.position.phase
    if phase not in _PASSES:
        return _ACCESS if phase != Phase.OPTIMIZER and _is_sharded(tensor) else None
    if not isinstance(tensor, torch.nn.Parameter):
        return None
    setattr(context, _OF_PARAMETER, True)
    return _GATHER


def _is_sharded(tensor: Any) -> bool:
    """Return whether a DTensor is sharded, like parameters and optimizer states, and has no partial sums."""
    placements = getattr(tensor, "placements", ())
    return any(each.is_shard() for each in placements) and not any(each.is_partial() for each in placements)


def _of_backward(context: Any = None, *_: Any) -> hooks.tag | None:
    return _REDUCE if getattr(context, _OF_PARAMETER, False) else None


_wrap_redistribution: Final = _by(_of_redistribution)
_wrap_distribution: Final = _by(_of_distribution)
_wrap_forward: Final = _by(_of_forward)
_wrap_backward: Final = _by(_of_backward)
