"""One forward and backward pass of a real module over fake tensors: what is alive between its gradients.

torch's FakeTensorMode computes shapes, element types and storages without values: neither memory nor time of the model is
needed. Kernels are those of the CPU, whose attention keeps no matrix of all pairs of tokens, as FlashAttention on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from commprof.plan.memory.spans import Span

_SHOWN: Final = 200  # characters of the message of somebody else's error


class TraceError(Exception):
    """The pass failed; the message says where and why, in one line."""


def trace(
    module: torch.nn.Module,
    inputs: Any,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> list[Span]:
    """Run one pass of ``module`` over fake tensors, and return what is alive between its gradients.

    Args:
        module: built on the meta device; its tensors are replaced by fake ones.
        inputs: of one micro-batch: a tensor, positional arguments as a tuple or list, or keyword arguments as a mapping.
        dtype: to which floating-point parameters, buffers and inputs are cast; None leaves them.
        autocast: in which torch.autocast computes; None turns it off.

    Raises:
        TraceError: the pass failed, as one that depends on values does.
    """
    mode = FakeTensorMode()
    spans: list[Span] = []
    try:
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
            with live, torch.autocast("cpu", autocast or torch.bfloat16, autocast is not None):
                outputs = _call(module, inputs)
            with live:
                _differentiate(outputs)
    except (Exception, SystemExit) as problem:
        message = " ".join(str(problem).split())[:_SHOWN]
        raise TraceError(f"{type(module).__name__} raised {type(problem).__name__}: {message}") from None
    return [*spans, live.take_span("")]


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations return, until nothing refers to them."""

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
        """Do not count the storage of ``tensor``, as long as it exists."""
        self._see(tensor, counted=False)

    def take_span(self, parameter: str) -> Span:
        """Return the span since the last call, which ends with the gradient of ``parameter``."""
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


def _replaced(module: torch.nn.Module, inputs: Any, dtype: torch.dtype | None) -> Any:
    """Replace the tensors of ``module`` by fake ones on the CPU, tied ones by the same, and return fake ``inputs``."""
    fakes: dict[
        int, tuple[torch.Tensor, torch.Tensor]
    ] = {}  # the meta tensor too, so that its id stays its own

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
    """Run the backward pass from the loss in ``outputs``, or without one from all of them."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    tensors = [
        each
        for each in tree_leaves(outputs if loss is None else loss)
        if isinstance(each, torch.Tensor) and each.grad_fn is not None
    ]
    if not tensors:
        raise ValueError("the outputs have no tensor with a gradient")
    torch.autograd.backward(tensors, [torch.empty_like(each) for each in tensors])
