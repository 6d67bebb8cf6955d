"""Publishes the parameters of the trained models, with their names in the model and their groups in the optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from commprof import hooks

# The words that wrappers insert into the names of parameters.
_WRAPPERS: Final = frozenset(
    {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_flat_param"}
)
_OPAQUE: Final = frozenset({"deepspeed"})


class Parameter(NamedTuple):
    """A parameter as the model defines it: with its full shape and its own name, before any wrapper changed it."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    numel: int
    requires_grad: bool
    keys: tuple[int, ...]  # the ids of the tensors that an optimizer may contain for this parameter
    ep_size: int | None = None  # for an expert's parameter: the number of ranks that share the experts


class Models:
    """Publishes the parameters of the trained models once, unless the program publishes them itself.

    Args:
        on_fault: A function that receives the exception if publishing fails.
    """

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        self.published = False
        self._on_fault = on_fault
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._speaking = False

    def saw(self, module: torch.nn.Module) -> None:
        """Register that ``module`` runs in training as the outermost module."""
        if self.published or any(each() is module for each in self._models):
            return
        # Exclude an engine of a version that the adapter refuses, because its changes to the parameters are not known.
        if type(module).__module__.partition(".")[0] not in _OPAQUE:
            self._models.append(weakref.ref(module))

    def heard(self) -> None:
        """Register that parameters were published, by the program or by this object."""
        self.published = self.published or not self._speaking

    def publish(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Publish the registered models. The parameter groups of all ``optimizers`` are numbered consecutively."""
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
    """Return the parameters of all ``models``. If there are several models, each name begins with the model's class."""
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
    """Return the parameters of ``model`` in the model's order, with the original parameters of FSDP 1's flat ones."""
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
    # If FSDP 1 keeps the original names in the model, their order is known. Otherwise the order of the units is used.
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
    """Return whether ``module`` or one of its children is in training mode.

    The children matter in two cases. Lightning changes the mode of the model within a wrapper, but not the mode of the
    wrapper. A program may also train only the last layer.
    """
    return module.training or any(child.training for child in module.children())


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module within the wrappers of DDP and torch.compile, or ``model`` itself if there is no wrapper."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "reducer"):
            inner = getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def plain_name(name: str, model: torch.nn.Module | None = None) -> str:
    """Return ``name`` without the words that wrappers inserted. ``model`` is the module that contains the name.

    >>> plain_name("_orig_mod.layers.0._fsdp_wrapped_module.weight")
    'layers.0.weight'
    """
    words = [word for word in name.split(".") if word not in _WRAPPERS]
    if model is not None and hasattr(model, "reducer") and words[:1] == ["module"]:
        del words[0]
    return ".".join(words)


def parameter_rows(parameters: Sequence[Parameter], group_of: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``parameters`` in the order of the optimizer's groups; parameters without a group come last.

    Args:
        parameters: The parameters in the model's order.
        group_of: The number of the optimizer's group by the ``id`` of the parameter, in the optimizer's order.
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
