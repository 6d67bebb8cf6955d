"""Layers that a pipeline builds when it knows which stage has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zero_runtime.errors import ConfigError


class LayerSpec:
    """A layer that is not built yet: ``LayerSpec(torch.nn.Linear, 8, 8)``.

    Args:
        typename: a class of modules.
        module_args, module_kwargs: what it is built with.

    Raises:
        ConfigError: ``typename`` is no class of modules.
    """

    def __init__(
        self, typename: Callable[..., torch.nn.Module], *module_args: Any, **module_kwargs: Any
    ) -> None:
        if not (isinstance(typename, type) and issubclass(typename, torch.nn.Module)):
            raise ConfigError(
                f"LayerSpec of {typename!r}: expected a subclass of torch.nn.Module, followed by its arguments; a function "
                "can be a layer itself"
            )
        self.typename: Any = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> torch.nn.Module:
        """Make the layer; ``log`` is accepted for DeepSpeed's signature."""
        module: torch.nn.Module = self.typename(*self.module_args, **self.module_kwargs)
        return module

    def __repr__(self) -> str:
        shown = [
            *map(repr, self.module_args),
            *(f"{name}={each!r}" for name, each in self.module_kwargs.items()),
        ]
        return f"{self.typename.__name__}({', '.join(shown)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares parameters with all others of the same ``key``, also of other stages.

    Args:
        key: what those have in common; the layer is built once in each stage.
        typename: a class of modules.
        module_args, module_kwargs: what it is built with.
        forward_fn: called with (module, input) in place of the module itself.
        tied_weight_attr: names of the shared parameters in the module, dotted where they are deeper.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., torch.nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


Layer = torch.nn.Module | LayerSpec | Callable[[Any], Any]


def checked_layers(candidates: Any) -> list[Layer]:
    """The layers that a PipelineModule is given.

    Raises:
        ConfigError: it is no sequence of them, or one of them is none.
    """
    if not isinstance(candidates, Iterable) or isinstance(candidates, str | Mapping | torch.nn.ModuleDict):
        raise ConfigError(
            f"layers of a PipelineModule are a {type(candidates).__name__}; expected a list of modules, LayerSpecs and "
            "functions, or a torch.nn.Sequential"
        )
    layers = list(candidates)
    for number, layer in enumerate(layers):
        if not callable(layer) and not isinstance(layer, LayerSpec):
            raise ConfigError(
                f"layer {number} of the pipeline is a {type(layer).__name__}; expected a module, LayerSpec or function"
            )
    if not layers:
        raise ConfigError("a PipelineModule needs at least one layer")
    return layers


def name_of(layer: Layer) -> str:
    """What a layer is called where it is shown, and where a pattern looks for it."""
    if isinstance(layer, LayerSpec):
        return str(layer.typename.__name__)
    if isinstance(layer, torch.nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", type(layer).__name__))


def trained_numel(layer: Layer) -> int:
    """Elements of a layer's trainable parameters. One that is not built is built for it, without memory where it can be.

    The random numbers that come next are the same as without the call.
    """
    if isinstance(layer, LayerSpec):
        layer = draft(layer)
    if not isinstance(layer, torch.nn.Module):
        return 0
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)


def draft(spec: LayerSpec) -> torch.nn.Module:
    """A layer to look at, built without memory where it can be. The random numbers that come next stay the same."""
    with torch.random.fork_rng():
        try:
            with torch.device("meta"):
                return spec.build()
        except (RuntimeError, TypeError):  # it computes with values, or names a device
            return spec.build()
