"""Trace a forward and backward pass of a real module over fake tensors, and measure the bytes between its gradients.

torch's FakeTensorMode computes shapes, element types and storages without values. So the trace needs neither the
memory nor the time of the model. The kernels are those of the CPU. Their attention does not keep a matrix of all pairs
of tokens, and neither does FlashAttention on a GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from commprof.plan.memory.spans import Span

_replacing: Final = threading.Lock()  # held while torch's linear function is replaced
_SHOWN: Final = 200  # maximum number of characters that are shown of an error message from other code


class TraceError(Exception):
    """The pass failed. The message names the module and the error, in one line."""


def trace(
    module: torch.nn.Module,
    inputs: Any,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    is_sharded: bool = False,
    weight_first: bool = False,
) -> list[Span]:
    """Run one pass of ``module`` over fake tensors, and return the spans between its gradients.

    Args:
        module: A module that was built on the meta device. Its tensors are replaced by fake tensors.
        inputs: The inputs of one micro-batch: a tensor, positional arguments as a tuple or list, or keyword
            arguments as a mapping.
        dtype: The type to which floating-point parameters, buffers and inputs are cast. None keeps their types.
        autocast: The type in which torch.autocast computes. None turns autocast off.
        is_sharded: Whether modules are called in the way in which stage 3 calls them.
        weight_first: Whether the linear layers are those of stage 3, whose weight gradient is ready first.

    Raises:
        TraceError: The pass failed, for example because it depends on values.
    """
    mode = FakeTensorMode()
    spans: list[Span] = []
    try:
        # The first backward pass of a process starts a thread for each device, and a process with such threads cannot
        # fork ranks. This pass runs before the fake tensors exist, because with fake tensors a CUDA build of torch
        # reports eight devices, even on a machine without a GPU.
        torch.autograd.backward(torch.ones(1, device="cpu", requires_grad=True).sum())
        with mode:
            inputs = _replaced(module, inputs, dtype)
            module.train()
            live = _Live(tree_leaves(inputs))
            for tensor in (*module.parameters(), *module.buffers()):
                live.ignore(tensor)
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        _arrival(live, spans, name)
                    )
            if is_sharded:
                for each in module.modules():
                    each.register_forward_pre_hook(_separate)
            # The replacement stays for the backward pass too, in which a checkpointed part calls its linear layers
            # again.
            with live, _linear_of_stage_3() if weight_first else nullcontext():
                with torch.autocast("cpu", autocast or torch.bfloat16, autocast is not None):
                    outputs = _call(module, inputs)
                _differentiate(outputs)
    except (Exception, SystemExit) as problem:
        message = " ".join(str(problem).split())[:_SHOWN]
        raise TraceError(f"{type(module).__name__} raised {type(problem).__name__}: {message}") from None
    return [*spans, live.take_span("")]


@contextmanager
def _linear_of_stage_3() -> Iterator[None]:
    """Replace linear layers in this thread like the runtimes do at stage 3 (``memory_efficient_linear``).

    The replaced layers save their inputs in the original type, even with autocast or for a frozen weight. The
    gradient of the weight is ready before the gradient of the bias. torch's function is replaced because a mode of
    torch would not see the layers that a checkpoint calls again in the backward pass.
    """
    own = threading.get_ident()

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if threading.get_ident() != own:
            return before(input, weight, bias)
        return _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]

    with _replacing:
        before = functional.linear
        functional.linear = linear
        try:
            yield
        finally:
            functional.linear = before


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        output = inputs.matmul(weight.t())
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        enabled, dtype = ctx.autocast
        of_inputs = of_weight = of_bias = None
        with torch.autocast("cpu", dtype, enabled):
            if ctx.needs_input_grad[0]:
                of_inputs = gradient.matmul(weight)
            rows = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[1]:
                of_weight = rows.t().matmul(inputs.reshape(-1, inputs.shape[-1]))
            if ctx.needs_input_grad[2]:
                of_bias = rows.sum(0)
        return of_inputs, of_weight, of_bias


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the bytes of the storages that operations return, until nothing refers to them."""

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refs: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._now = self._most = 0
        for tensor in tensors:
            self._see(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            self._see(result)
        return results

    def ignore(self, tensor: torch.Tensor) -> None:
        """Exclude the storage of ``tensor`` from the count, as long as it exists."""
        self._see(tensor, counted=False)

    def take_span(self, parameter: str) -> Span:
        """Return the span since the last call of this method. The span ends with the gradient of ``parameter``."""
        most, self._most = self._most, self._now
        return Span(most, self._now, parameter)

    def _see(self, value: Any, counted: bool = True) -> None:
        if not isinstance(value, torch.Tensor):
            return
        storage = value.untyped_storage()
        key = storage._cdata
        _, seen = self._refs.get(key, (None, None))
        if seen is not None and (counted or not seen):
            return
        num_bytes = storage.nbytes() if counted else 0
        self._now += num_bytes - (seen or 0)
        self._most = max(self._most, self._now)
        self._refs[key] = weakref.ref(storage, lambda _: self._forget(key)), num_bytes

    def _forget(self, key: int) -> None:
        _, num_bytes = self._refs.pop(key)
        self._now -= num_bytes


def _arrival(live: _Live, spans: list[Span], name: str) -> Callable[[torch.Tensor], None]:
    def arrive(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        spans.append(live.take_span(name))
        parameter.grad = None
        live.take_span("")

    return arrive


def _separate(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace an input that is passed twice by two tensors, as stage 3 does.

    torch's attention then projects each input separately.
    """
    seen: set[int] = set()

    def separate(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) in seen:
            return value.view_as(value)
        seen.add(id(value))
        return value

    return tuple(map(separate, inputs))


def _replaced(module: torch.nn.Module, inputs: Any, dtype: torch.dtype | None) -> Any:
    """Replace the tensors of ``module`` by fake tensors on the CPU, and return fake ``inputs``.

    Tied tensors are replaced by the same fake tensor.
    """
    # The values include the meta tensor, so that it stays alive and no other tensor gets its id.
    fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            copy: torch.Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=cast, device="cpu")
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, tensor.requires_grad)
            fakes[id(tensor)] = tensor, copy
        return fakes[id(tensor)][1]

    for child in module.modules():
        owned: tuple[dict[str, Any], ...] = (child._parameters, child._buffers, vars(child))
        for tensors in owned:
            for name, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor):
                    tensors[name] = fake(tensor)
    return tree_map_only(torch.Tensor, fake, inputs)


def _call(module: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def _differentiate(outputs: Any) -> None:
    """Run the backward pass from the loss in ``outputs``, or from all outputs if there is no loss."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    tensors = [
        each
        for each in tree_leaves(outputs if loss is None else loss)
        if isinstance(each, torch.Tensor) and each.grad_fn is not None
    ]
    if not tensors:
        raise ValueError("the outputs have no tensor with a gradient")
    torch.autograd.backward(tensors, [torch.empty_like(each) for each in tensors])
