"""Units of gathering: a unit is one module with its parameters (stage 3)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, cast

import torch

from zero_runtime.sharding.gather_schedule import outside_access
from zero_runtime.sharding.gather_schedule.leaves import is_leaf
from zero_runtime.sharding.shards import Shard, shard_of

_WATCH: Final = "zero_watch"


class Host(Protocol):
    """The owner of units, which gathers parameters for them."""

    def read(self, unit: Unit, shard: Shard) -> None:
        """Gather a parameter that the unit's forward pass reads but that the unit does not own."""

    def before_backward(self, unit: Unit) -> None:
        """Handle that the gradient of an output of the unit is ready."""

    def after_backward(self, unit: Unit) -> None:
        """Handle that the gradients of all inputs of the unit are ready."""


class Unit:
    """One module with its parameters.

    These are the module's direct parameters (in a leaf module all parameters) and its external parameters.

    Attributes:
        number: The number of the unit in its model. Parents have lower numbers than their children.
        module: The module.
        name: The name of the module in the model.
        is_leaf: Whether the submodules are gathered together with the module.
        forward, backward: The keys of the unit in ``Shard.active`` during its forward and backward pass.
        awaited: The number of differentiable inputs of the last forward pass whose gradients are not ready. It
            becomes negative for the inputs of earlier forward passes.
    """

    __slots__ = (
        "_external",
        "_seen",
        "_shards",
        "awaited",
        "backward",
        "forward",
        "host",
        "is_leaf",
        "module",
        "name",
        "number",
    )

    def __init__(self, number: int, module: torch.nn.Module, host: Host, name: str) -> None:
        self.number = number
        self.name = name
        self.module = module
        self.host = host
        self.forward, self.backward = 2 * number, 2 * number + 1
        self.is_leaf = is_leaf(module)
        self.awaited = 0
        self._external = outside_access.external_parameters(module)
        self._shards: list[Shard] = []
        # The version of the parameters for which ``_shards`` is valid.
        self._seen: tuple[int, int] | None = None

    def shards(self) -> list[Shard]:
        """Return the shards of the unit's parameters, without duplicates, by number."""
        parameters = self.module._parameters
        if self.is_leaf or not isinstance(parameters, outside_access.WatchedParameters):
            return self.find(self.is_leaf)
        now = parameters.version, len(self._external)
        if now != self._seen:
            self._shards, self._seen = self.find(False), now
        return self._shards

    def find(self, deep: bool) -> list[Shard]:
        """Return the shards of the module's parameters and of external parameters.

        ``deep`` includes the parameters of submodules.
        """
        owned = self.module.parameters() if deep else self.module._parameters.values()
        by_number = {
            shard.number: shard for p in owned if p is not None and (shard := shard_of(p)) is not None
        }
        for parameter in self._external.values():
            shard = shard_of(parameter)
            if shard is not None:
                by_number[shard.number] = shard
        return [by_number[number] for number in sorted(by_number)]

    @property
    def reads_backward(self) -> bool:
        """Whether the backward pass of the unit reads parameters."""
        return reads_backward(self.module) or bool(self._external)

    def add_external(self, parameter: torch.nn.Parameter) -> None:
        """Add ``parameter`` to the parameters of this unit."""
        self._external[id(parameter)] = parameter

    def read(self, shard: Shard) -> None:
        """Gather a parameter that the forward pass of this unit reads and that no running module uses."""
        self.host.read(self, shard)


def reads_backward(module: torch.nn.Module) -> bool:
    """Return whether the backward pass of ``module`` reads its parameters.

    The backward pass of an embedding only adds to the rows that were looked up.
    """
    return type(module) is not torch.nn.Embedding or "forward" in module.__dict__


def units_of(module: torch.nn.Module, host: Host) -> list[Unit]:
    """Return a unit for every module, except for modules inside leaf modules. Parents are before children."""
    units: list[Unit] = []
    seen: set[torch.nn.Module] = set()

    def visit(module: torch.nn.Module, name: str) -> None:
        if module in seen:
            return
        seen.add(module)
        units.append(Unit(len(units), module, host, name or type(module).__name__))
        if not is_leaf(module):
            for child_name, child in module.named_children():
                visit(child, f"{name}.{child_name}" if name else child_name)

    visit(module, "")
    return units


def watch_outputs(unit: Unit, output: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Notify the unit's host when the gradient of one of ``tensors`` in ``output`` is ready.

    A hook on a tensor is cheap. But with several outputs, one output is often computed from another, such as a
    loss from logits. The hook would then also run for the gradient from inside the module. Therefore several
    outputs are replaced.

    Returns:
        A replacement of the module's output; None to keep the output.
    """
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    # A hook on a parameter would outlive the iteration.
    if len(differentiable) == 1 and differentiable[0].grad_fn is not None:
        _watch(unit, differentiable[0])
        return None
    if not differentiable:
        return None
    replaced = set()

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        replaced.add(id(tensor))
        return cast(torch.Tensor, _Exit.apply(unit, tensor))  # type: ignore[no-untyped-call]

    changed = _map(output, replace)
    for tensor in differentiable:
        if id(tensor) not in replaced and tensor.grad_fn is not None:
            _watch(unit, tensor)
    return changed if replaced else None


def _watch(unit: Unit, tensor: torch.Tensor) -> None:
    """Watch a tensor. If a child and its parent return the same tensor, the parent is notified first."""
    watched = tensor.__dict__.get(_WATCH)
    if watched is not None and watched[0] is tensor.grad_fn:
        watched[1].insert(0, unit)
        return
    units = [unit]
    setattr(tensor, _WATCH, (tensor.grad_fn, units))

    def tell(gradient: torch.Tensor) -> None:
        for each in units:
            each.host.before_backward(each)

    tensor.register_hook(tell)


class _Exit(torch.autograd.Function):
    """The identity function on an output of a module. Its backward pass notifies the unit's host."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, tensor: torch.Tensor) -> torch.Tensor:
        ctx.unit = unit
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        ctx.unit.host.before_backward(ctx.unit)
        return None, gradient


class _Entrance(torch.autograd.Function):
    """The identity function on an input of a module.

    After the last input, its backward pass notifies the unit's host.

    There is one instance for each input, as in DeepSpeed. If a tensor is passed twice, its gradients are then
    added in the same order as in DeepSpeed, which matters in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, unit: Unit, tensor: torch.Tensor) -> torch.Tensor:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:  # type: ignore[override]
        # If a module has run several times, the backward pass of its last run is the first. Parameters that the other
        # runs gather again are released at the end of the backward pass.
        ctx.unit.awaited -= 1
        if ctx.unit.awaited == 0:
            ctx.unit.host.after_backward(ctx.unit)
        return None, gradient


def watch_inputs(unit: Unit, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Wrap the differentiable tensors among the positional inputs of a module, to notify the host of their gradients.

    A tensor that is passed twice becomes two tensors, as in DeepSpeed. torch's attention then projects its
    three inputs separately.

    Returns:
        The inputs with which the module runs; None to keep the inputs.
    """
    tensors = list(tensors_in(inputs))
    distinct = len(set(map(id, tensors))) == len(tensors)
    differentiable = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal differentiable
        differentiable += tensor.requires_grad
        return tensor

    _map(inputs, count)
    unit.awaited = differentiable
    if not differentiable and distinct:
        return None

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            return cast(torch.Tensor, _Entrance.apply(unit, tensor))  # type: ignore[no-untyped-call]
        return tensor if distinct else tensor.detach()

    changed: tuple[Any, ...] = _map(inputs, replace)
    return changed


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with ``function`` applied to its tensors, within tuples, named tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind in (list, tuple):
        return kind([_map(each, function) for each in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(_map(each, function) for each in value))
    if isinstance(value, dict):
        copied = copy.copy(value)
        for name, each in value.items():
            copied[name] = _map(each, function)
        return copied
    return value
