"""What is gathered at once: the parameters of one module (stage 3)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, cast

import torch

from zero_runtime.sharding import access
from zero_runtime.sharding.leaves import is_leaf
from zero_runtime.sharding.shards import Shard, shard_of

_WATCH: Final = "zero_watch"


class Host(Protocol):
    """Who gathers for a unit."""

    def read(self, unit: Unit, shard: Shard) -> None:
        """The unit's forward pass reads a parameter that is not its own."""

    def before_backward(self, unit: Unit) -> None:
        """The gradient of an output of the unit is there."""

    def after_backward(self, unit: Unit) -> None:
        """The gradients of all inputs of the unit are there."""


class Unit:
    """One module and its parameters: its direct ones, all of them in a leaf module, and those used from elsewhere.

    Attributes:
        number: counts the units of a model, parents first.
        module: the module.
        is_leaf: everything inside is gathered with it.
        forward, backward: what stands for this unit in ``Shard.active`` while it runs forward and backward.
        awaited: differentiable inputs of the last forward pass whose gradients have not come, negative for earlier ones.
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
        "number",
    )

    def __init__(self, number: int, module: torch.nn.Module, host: Host) -> None:
        self.number = number
        self.module = module
        self.host = host
        self.forward, self.backward = 2 * number, 2 * number + 1
        self.is_leaf = is_leaf(module)
        self.awaited = 0
        self._external = access.external_parameters(module)
        self._shards: list[Shard] = []
        self._seen: tuple[int, int] | None = None  # when it had these shards

    def shards(self) -> list[Shard]:
        """The shards of its parameters, each once, by number."""
        parameters = self.module._parameters
        if self.is_leaf or not isinstance(parameters, access.WatchedParameters):
            return self.find(self.is_leaf)
        now = parameters.version, len(self._external)
        if now != self._seen:
            self._shards, self._seen = self.find(False), now
        return self._shards

    def find(self, deep: bool) -> list[Shard]:
        """The shards of the module's parameters, with or without those of the modules inside it, and of borrowed ones."""
        owned = self.module.parameters() if deep else self.module._parameters.values()
        found = {shard.number: shard for p in owned if p is not None and (shard := shard_of(p)) is not None}
        for parameter in self._external.values():
            shard = shard_of(parameter)
            if shard is not None:
                found[shard.number] = shard
        return [found[number] for number in sorted(found)]

    def add_external(self, parameter: torch.nn.Parameter) -> None:
        """Count ``parameter`` among those of this unit from now on."""
        self._external[id(parameter)] = parameter

    def read(self, shard: Shard) -> None:
        """The forward pass of this unit reads a parameter that is not whole."""
        self.host.read(self, shard)


def units_of(module: torch.nn.Module, host: Host) -> list[Unit]:
    """A unit for every module, but not for those inside leaf modules. Parents come before children."""
    units: list[Unit] = []
    seen: set[torch.nn.Module] = set()

    def visit(module: torch.nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        units.append(Unit(len(units), module, host))
        if not is_leaf(module):
            for child in module.children():
                visit(child)

    visit(module)
    return units


def watch_outputs(unit: Unit, output: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Tell the unit's host when the gradient of an output is there: of each of ``tensors``, which are in ``output``.

    A hook on a tensor is cheap, but of several outputs one is often made of another, as a loss of logits: the hook would
    tell of the gradient that comes from inside the module too.

    Returns:
        What the module is to return instead; None for what it did.
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
    """A tensor that a child returned and its parent returns again tells of the parent first."""
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
    """Passes an output of a module on, and tells its unit's host when its gradient is there."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, tensor: torch.Tensor) -> torch.Tensor:
        ctx.unit = unit
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        ctx.unit.host.before_backward(ctx.unit)
        return None, gradient


class _Entrance(torch.autograd.Function):
    """Passes an input of a module on, and tells its unit's host when the gradients of all of them are there.

    One for each input, as in DeepSpeed: then the gradients of a tensor that is passed twice are added in the same order,
    which shows in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, unit: Unit, tensor: torch.Tensor) -> torch.Tensor:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:  # type: ignore[override]
        # A module that has run several times is done after its last run, whose backward pass is the first; of what the
        # others gather again nothing is released before the end.
        ctx.unit.awaited -= 1
        if ctx.unit.awaited == 0:
            ctx.unit.host.after_backward(ctx.unit)
        return None, gradient


def watch_inputs(unit: Unit, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Replace the differentiable tensors among the positional inputs of a module, so that the host hears of their gradients.

    A tensor that is passed twice becomes two, as in DeepSpeed: torch's attention then projects its three inputs apart.

    Returns:
        The inputs to run the module with; None where there is nothing to differentiate.
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
    """The tensors in nested tuples, lists, mappings and dataclasses."""
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
    """``value`` with ``function`` of its tensors, in what can be made again: tuples, named or not, lists and any dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind in (list, tuple):
        return kind([_map(each, function) for each in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(_map(each, function) for each in value))
    if isinstance(value, dict):
        made = copy.copy(value)
        for name, each in value.items():
            made[name] = _map(each, function)
        return made
    return value
