"""Leaf modules: modules that stage 3 gathers and releases together with all their submodules.

Leaf modules are for modules whose children run in an order that differs between ranks or steps (mixtures of
experts). They are also for submodules that are too small for separate messages. A flag marks a leaf module.
``initialize`` reads the flag when it shards the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from zero_runtime.errors import ConfigError
from zero_runtime.sharding.shards import shard_of

_FLAG: Final = "_z3_leaf"  # DeepSpeed's name, which model libraries set themselves
_LARGEST: Final = 1_000_000_000  # elements; a larger leaf module would gather too much at once
_CONTAINERS: Final = frozenset(torch.nn.modules.container.__all__)

DEFAULT_CLASSES: Final = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


def is_leaf(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is flagged as a leaf module."""
    return bool(module.__dict__.get(_FLAG, False))


def z3_leaf_module(model: torch.nn.Module) -> bool:
    """Return whether ``model`` itself is flagged as a leaf module. This is DeepSpeed's name of :func:`is_leaf`."""
    return is_leaf(model)


def set_z3_leaf_module(model: torch.nn.Module, flag: bool) -> None:
    """Flag one module as a leaf module, or remove the flag."""
    setattr(model, _FLAG, bool(flag))


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Flag every module in ``model`` of one of the classes.

    Classes are types, or names with or without their Python module.

    Returns:
        The modules that were flagged.

    Raises:
        ConfigError: No module matches and ``raise_if_not_found`` is True.
    """
    return _flag_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Remove the flag from every module in ``model`` of one of the classes; see :func:`set_z3_leaf_modules`."""
    return _flag_classes(model, leaf_module_classes, False, raise_if_not_found)


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the flagged modules in ``model``."""
    return [module for module in model.modules() if is_leaf(module)]


def flag_configured(
    model: torch.nn.Module, classes: Iterable[str], names: Iterable[str], suffixes: Iterable[str]
) -> list[torch.nn.Module]:
    """Flag the modules in the ``leaf_module`` block of the configuration.

    Names without a match are ignored, as in DeepSpeed.

    Returns:
        The modules that were flagged.
    """
    wanted, endings = set(names), tuple(suffixes)
    flagged = _flag_classes(model, tuple(classes), True, False)
    for name, module in model.named_modules():
        if name in wanted or (endings and name.endswith(endings)):
            set_z3_leaf_module(module, True)
            flagged.append(module)
    return flagged


def flag_fine(model: torch.nn.Module, granularity: int) -> list[torch.nn.Module]:
    """Flag the outermost modules that have at most ``granularity`` elements per layer, and return them."""
    flagged: list[torch.nn.Module] = []
    _visit(model, granularity, flagged)
    for module in flagged:
        set_z3_leaf_module(module, True)
    return flagged


def _flag_classes(
    model: torch.nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[torch.nn.Module]:
    types = tuple(each for each in classes if isinstance(each, type))
    names = {each for each in classes if isinstance(each, str)}
    if len(types) + len(names) < len(set(classes)):
        raise ConfigError(f"leaf_module_classes are {list(classes)}; expected classes, or names of classes")
    flagged = []
    for module in model.modules():
        kind = type(module)
        if isinstance(module, types) or names & {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}:
            set_z3_leaf_module(module, flag)
            flagged.append(module)
    if not flagged and raise_if_not_found:
        shown = ", ".join(each if isinstance(each, str) else each.__name__ for each in classes)
        raise ConfigError(f"there is no module of class {shown or 'none'} in the model")
    return flagged


def _visit(module: torch.nn.Module, granularity: int, flagged: list[torch.nn.Module]) -> None:
    if next(module.parameters(), None) is None:
        return
    layers, numel = _extent(module)
    single = next(module.children(), None) is None or type(module).__name__ in _CONTAINERS
    if not single and numel <= _LARGEST and numel // layers <= granularity:
        flagged.append(module)
        return
    for child in module.children():
        _visit(child, granularity, flagged)


def _extent(module: torch.nn.Module) -> tuple[int, int]:
    """Return two numbers for ``module`` and its submodules.

    The first is the number of modules with parameters, without containers. The second is the number of
    elements.
    """
    if next(module.parameters(), None) is None:
        return 0, 0
    numel = sum(_numel(parameter) for parameter in module.parameters(recurse=False))
    children = list(module.children())
    layers = 0 if type(module).__name__ in _CONTAINERS and children else 1
    for child in children:
        more_layers, more = _extent(child)
        layers, numel = layers + more_layers, numel + more
    return layers, numel


def _numel(parameter: torch.nn.Parameter) -> int:
    shard = shard_of(parameter)
    return parameter.numel() if shard is None else shard.numel
