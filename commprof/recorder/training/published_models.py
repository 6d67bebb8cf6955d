"""Publishes the parameters of the trained models, with their names in the model and their groups in the optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from commprof import hooks

# What wrappers put between the parts of a name.
_WRAPPERS: Final = frozenset(
    {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_flat_param"}
)
_OPAQUE: Final = frozenset({"deepspeed"})


class Parameter(NamedTuple):
    """A parameter as the model was written: whole, under its own name."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    numel: int
    requires_grad: bool
    keys: tuple[int, ...]  # the ``id`` of what an optimizer may hold for it
    ep_size: int | None = None  # of an expert's parameter: ranks that share the experts


class Models:
    """Publishes the parameters of the models that are trained, once, unless the program does.

    Args:
        on_fault: called with what went wrong.
    """

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        self.published = False
        self._on_fault = on_fault
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._speaking = False

    def saw(self, module: torch.nn.Module) -> None:
        """``module`` runs in training, and no other module around it."""
        if self.published or any(each() is module for each in self._models):
            return
        # An engine of a version that its adapter refuses: what it has done to its parameters is not known.
        if type(module).__module__.partition(".")[0] not in _OPAQUE:
            self._models.append(weakref.ref(module))

    def heard(self) -> None:
        """Somebody has published parameters."""
        self.published = self.published or not self._speaking

    def publish(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Publish what was seen, with the groups of ``optimizers`` numbered through."""
        if self.published:
            return
        self.published = self._speaking = True
        try:
            models = [model for model in (each() for each in self._models) if model is not None]
            self._models.clear()
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
            hooks.describe_parameters(parameter_rows(distinct(models), group_of))
        except Exception as error:
            self._on_fault(error)
        finally:
            self._speaking = False


def distinct(models: Sequence[torch.nn.Module]) -> list[Parameter]:
    """The parameters of all ``models``; with several, each name begins with the class of its model."""
    parameters: list[Parameter] = []
    seen: set[tuple[int, str]] = set()
    for number, model in enumerate(models):
        kind = type(unwrapped(model)).__name__
        same = [type(unwrapped(other)).__name__ for other in models].count(kind) > 1
        prefix = f"{kind}{number if same else ''}." if len(models) > 1 else ""
        for parameter in parameters_of(model):
            itself = parameter.keys[-1], parameter.name
            if itself not in seen:
                seen.add(itself)
                parameters.append(parameter._replace(name=prefix + parameter.name))
    return parameters


def parameters_of(model: torch.nn.Module) -> list[Parameter]:
    """The parameters of ``model`` in its order. What FSDP 1 keeps flat is told as it was before."""
    flat: dict[int, list[Parameter]] = {}
    for path, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        content = getattr(handle, "flat_param", None)
        if content is not None and hasattr(content, "_fqns"):
            flat[id(content)] = list(_flattened(plain_name(path, model), content))
    of_flat = {key for parameters in flat.values() for each in parameters for key in each.keys}
    ordered = [parameter for parameters in flat.values() for parameter in parameters]
    for name, parameter in model.named_parameters():
        if id(parameter) not in of_flat:
            ordered.append(
                Parameter(
                    plain_name(name, model),
                    tuple(parameter.shape),
                    parameter.dtype,
                    parameter.numel(),
                    parameter.requires_grad,
                    (id(parameter),),
                )
            )
    # Where FSDP 1 leaves the names in the model, their order is known; else it is that of the units.
    order = {plain_name(name, model): number for number, (name, _) in enumerate(model.named_parameters())}
    return sorted(ordered, key=lambda each: order.get(each.name, len(order)))


def _flattened(module: str, flat: Any) -> Iterator[Parameter]:
    originals = flat._params or [None] * len(flat._fqns)
    for name, shape, original in zip(flat._fqns, flat._shapes, originals, strict=False):
        keys = (id(flat),) if original is None else (id(flat), id(original))
        full_name = f"{module}.{name}" if module else name
        yield Parameter(
            plain_name(full_name),
            tuple(shape),
            flat.dtype,
            shape.numel(),
            flat.requires_grad if original is None else original.requires_grad,
            keys,
        )


def trains(module: torch.nn.Module) -> bool:
    """Whether ``module``, or what it wraps, is in training mode.

    Lightning changes the mode of the model within a wrapper and not the wrapper's; a program may train the last layer alone.
    """
    return module.training or any(child.training for child in module.children())


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module that DDP or torch.compile was given."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "reducer"):
            inner = getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def plain_name(name: str, model: torch.nn.Module | None = None) -> str:
    """``name`` without what wrappers have put into it; ``model`` is the module that it was read from.

    >>> plain_name("_orig_mod.layers.0._fsdp_wrapped_module.weight")
    'layers.0.weight'
    """
    words = [word for word in name.split(".") if word not in _WRAPPERS]
    if model is not None and hasattr(model, "reducer") and words[:1] == ["module"]:
        del words[0]
    return ".".join(words)


def parameter_rows(parameters: Sequence[Parameter], group_of: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """Rows of ``parameters``, in the order of the optimizer's groups, those that it has not last.

    Args:
        parameters: in the model's order.
        group_of: the optimizer's group by the ``id`` of the parameter, in the optimizer's order.
    """
    index: dict[int, list[int]] = {}
    for number, parameter in enumerate(parameters):
        for key in parameter.keys:
            index.setdefault(key, []).append(number)
    order = list(dict.fromkeys(number for key in group_of for number in index.get(key, ())))
    placed = set(order)
    order += [number for number in range(len(parameters)) if number not in placed]
    for number in order:
        parameter = parameters[number]
        yield {
            "name": parameter.name,
            "shape": "x".join(map(str, parameter.shape)),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "numel": int(parameter.numel),
            "param_group": next((group_of[key] for key in parameter.keys if key in group_of), -1),
            "requires_grad": parameter.requires_grad,
            "module": parameter.name.rpartition(".")[0],
            "forward_index": number,
            "ep_size": parameter.ep_size,
        }
