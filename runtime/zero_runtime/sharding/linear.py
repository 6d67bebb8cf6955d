"""The linear function of stage 3: torch's arithmetic, with a backward pass that saves no view of the weight.

torch's linear function saves a transposed view of the weight for backward. This view keeps the gathered weight
in memory after its release. The function of this module saves a reference to the parameter, whose memory may be
released. The reference is not a saved tensor, because activation checkpointing would keep the memory of a saved
tensor. As in DeepSpeed 0.19.8's ``memory_efficient_linear``, the gradient of the weight is ready before the
gradient of the bias. This determines how gradients fill buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn import functional

from zero_runtime.errors import UsageError
from zero_runtime.sharding.shards import shard_of

_torch_linear: Final = functional.linear


def _product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    # The bias is added separately, unless one operation does both for this shape. This is DeepSpeed's order of
    # roundings.
    if bias is None or inputs.dim() == 2:
        return _torch_linear(inputs, weight, bias)
    return inputs.matmul(weight.t()).add_(bias)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    features, weight, bias = inputs
    device = features.device.type
    ctx.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    sharded = shard_of(weight) is not None
    ctx.weight, ctx.version = (weight, weight._version) if sharded else (None, 0)
    ctx.save_for_backward(features, *(() if sharded else (weight,)))
    ctx.has_bias = bias is not None


def _remembered(ctx: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and the weight. Raise UsageError if the weight has changed since the forward pass."""
    if ctx.weight is None:
        inputs, weight = ctx.saved_tensors
        return inputs, weight
    if ctx.weight._version != ctx.version:
        raise UsageError(
            "the weight of a linear layer was changed in place between its forward and its backward pass; change it before "
            "or after both"
        )
    (inputs,) = ctx.saved_tensors
    return inputs, ctx.weight


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        output = _product(inputs, weight, bias)
        _remember(ctx, (inputs, weight, bias), output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight = _remembered(ctx)
        enabled, dtype = ctx.autocast
        of_inputs = of_weight = of_bias = None
        with torch.autocast(inputs.device.type, dtype=dtype, enabled=enabled):
            if ctx.needs_input_grad[0]:
                of_inputs = gradient.matmul(weight)
            rows = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[1]:
                of_weight = rows.t().matmul(inputs.reshape(-1, inputs.shape[-1]))
            if ctx.has_bias and ctx.needs_input_grad[2]:
                of_bias = gradient.sum(tuple(range(gradient.dim() - 1))) if gradient.dim() > 1 else gradient
        return of_inputs, of_weight, of_bias


class _TransformableLinear(_Linear):
    """The form for torch.func and vmap. It is slower to call, because torch looks up its signature each time."""

    generate_vmap_rule = True
    forward = staticmethod(_product)  # type: ignore[assignment]
    setup_context = staticmethod(_remember)


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    transformed = torch._C._are_functorch_transforms_active()
    function = _TransformableLinear if transformed else _Linear
    return function.apply(input, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


@contextmanager
def memory_efficient_linear() -> Iterator[None]:
    """A context in which ``torch.nn.functional.linear`` is the function of this module, for layers and direct calls."""
    before = functional.linear
    functional.linear = _linear
    try:
        yield
    finally:
        functional.linear = before
