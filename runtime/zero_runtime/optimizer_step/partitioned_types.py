"""Parameters that are never partitioned, selected by the classes of their modules.

``zero_allowed_param_types`` and ``zero_force_param_types`` name classes. A module matches a name if its class
or one of its base classes has that name. A parameter of several modules (tied weights) matches if one of these
modules matches. A class in ``zero_force_param_types`` takes precedence over one in
``zero_allowed_param_types``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch

from zero_runtime.errors import ConfigError

_ALLOWED = "zero_optimization.zero_allowed_param_types"
_FORCED = "zero_optimization.zero_force_param_types"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionedTypes:
    """The values of ``zero_allowed_param_types`` and ``zero_force_param_types``.

    Attributes:
        allowed: The classes of modules whose parameters may be partitioned. None allows all classes.
        whole: The classes of modules whose parameters are never partitioned.
    """

    allowed: tuple[str, ...] | None = None
    whole: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether any parameter may be excluded from partitioning."""
        return self.allowed is not None or bool(self.whole)


def whole_parameters(module: torch.nn.Module, types: PartitionedTypes) -> set[torch.nn.Parameter]:
    """Return the parameters of ``module`` that are never partitioned.

    Raises:
        ConfigError: A key names a class, and no module with parameters of its own has that class.
    """
    if not types:
        return set()
    owners = _owners(module, _names)
    known = {name for several in owners.values() for names in several for name in names}
    for key, wanted in ((_ALLOWED, types.allowed or ()), (_FORCED, types.whole)):
        _check(key, wanted, known)
    return {parameter for parameter, several in owners.items() if not _is_partitioned(several, types)}


def owner_types(module: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Return the classes of each parameter's owners, for the record of a run.

    The classes of one owner are separated by commas, and the owners by semicolons. The full name of a class is
    added in two cases: the class has the same name as a class of torch.nn but is a different class, or the
    module's forward was replaced. For example, an ``Embedding`` of the program may read its weight in the
    backward pass, which torch's ``Embedding`` does not do.
    """
    return {
        parameter: ";".join(",".join(sorted(names)) for names in several)
        for parameter, several in _owners(module, _recorded_names).items()
    }


def _owners(
    module: torch.nn.Module, names: Callable[[torch.nn.Module], set[str]]
) -> dict[torch.nn.Parameter, list[set[str]]]:
    owners: dict[torch.nn.Parameter, list[set[str]]] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            owners.setdefault(parameter, []).append(names(child))
    return owners


def _is_partitioned(owners: Sequence[set[str]], types: PartitionedTypes) -> bool:
    if any(names.intersection(types.whole) for names in owners):
        return False
    return types.allowed is None or any(names.intersection(types.allowed) for names in owners)


def _names(module: torch.nn.Module) -> set[str]:
    """Return the names of a module's class and of its base classes, up to but without torch.nn.Module."""
    return {each.__name__ for each in _classes(module)} - {"Module"}


def _recorded_names(module: torch.nn.Module) -> set[str]:
    others = {each for each in _classes(module) if getattr(torch.nn, each.__name__, each) is not each}
    if "forward" in vars(module):
        others.add(type(module))
    return _names(module) | {f"{each.__module__}.{each.__qualname__}" for each in others}


def _classes(module: torch.nn.Module) -> list[type]:
    return [each for each in type(module).__mro__ if issubclass(each, torch.nn.Module)]


def _check(key: str, wanted: Sequence[str], known: set[str]) -> None:
    for name in wanted:
        if name in known:
            continue
        near = get_close_matches(name, known, 1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{key} names {name!r}, and no module with parameters of its own is of that class; {meant}expected some of: "
            f"{', '.join(sorted(known))}"
        )
