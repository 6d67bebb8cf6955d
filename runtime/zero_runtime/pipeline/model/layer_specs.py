"""Layer specifications, from which a pipeline builds layers after it has assigned them to stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zero_runtime.errors import ConfigError


class LayerSpec:
    """A layer that is not built yet: ``LayerSpec(torch.nn.Linear, 8, 8)``.

    Args:
        typename: The class of the layer, a subclass of ``torch.nn.Module``.
        module_args, module_kwargs: The arguments of the class.

    Raises:
        ConfigError: ``typename`` is not a subclass of ``torch.nn.Module``.
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
        """Build the layer. ``log`` has no effect and exists for compatibility with DeepSpeed."""
        module: torch.nn.Module = self.typename(*self.module_args, **self.module_kwargs)
        return module

    def __repr__(self) -> str:
        shown = [
            *map(repr, self.module_args),
            *(f"{name}={each!r}" for name, each in self.module_kwargs.items()),
        ]
        return f"{self.typename.__name__}({', '.join(shown)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares parameters with all layers of the same ``key``, also with layers of other stages.

    Args:
        key: The key of the layers that share parameters. Each stage builds the layer once.
        typename: The class of the layer, a subclass of ``torch.nn.Module``.
        module_args, module_kwargs: The arguments of the class.
        forward_fn: A function that is called with (module, input) in place of the module itself.
        tied_weight_attr: The names of the shared parameters in the module, with dots for submodules.
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
    """Return the layers that are passed to a PipelineModule as a list, after a check of their types.

    Raises:
        ConfigError: ``candidates`` is not a sequence, or an element is not a layer.
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
    """Return the name of a layer for messages and patterns, which is its class name or function name."""
    if isinstance(layer, LayerSpec):
        return str(layer.typename.__name__)
    if isinstance(layer, torch.nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", type(layer).__name__))


def trained_numel(layer: Layer) -> int:
    """Return the number of elements of a layer's trainable parameters.

    A specification is built for this purpose, on the meta device if possible. The random generators are
    unchanged afterwards.
    """
    if isinstance(layer, LayerSpec):
        layer = draft(layer)
    if not isinstance(layer, torch.nn.Module):
        return 0
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)


def draft(spec: LayerSpec) -> torch.nn.Module:
    """Build a layer for inspection, on the meta device if possible. The random generators are unchanged afterwards."""
    with torch.random.fork_rng():
        try:
            with torch.device("meta"):
                return spec.build()
        except (RuntimeError, TypeError):  # The constructor computes with values, or sets a device.
            return spec.build()
