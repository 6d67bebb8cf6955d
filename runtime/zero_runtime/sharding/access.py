"""Parameters used outside the module that owns them (stage 3).

Tied weights, a weight that a parent hands to a function, a weight that a module returns: such a parameter belongs to
the module that uses it as well. It is found when that module reads it during its forward pass, or named by
:func:`register_external_parameter`.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch

from zero_runtime.sharding.shards import Shard, shard_of

_EXTERNAL: Final = "zero_external_parameters"


class Reader(Protocol):
    """A module whose forward pass is running."""

    def read(self, shard: Shard) -> None:
        """Make whole a parameter that the module reads and does not own."""


running: Final[
    list[Reader]
] = []  # of this process, innermost last; forward passes of one process do not interleave


class WatchedParameters(dict[str, Any]):
    """The parameters of a module (``module._parameters``); reading one that is not whole in a forward pass gathers it.

    Attributes:
        version: counts the changes.
    """

    version = 0

    def __setitem__(self, name: str, parameter: Any) -> None:
        super().__setitem__(name, parameter)
        self.version += 1

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.version += 1

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if running and parameter is not None:
            shard = shard_of(parameter)
            if shard is not None and not shard.available:
                running[-1].read(shard)
        return parameter


def watch(module: torch.nn.Module) -> None:
    """Notice when a parameter of ``module`` is read in another module's forward pass."""
    if not isinstance(module._parameters, WatchedParameters):
        module._parameters = WatchedParameters(module._parameters)


def unwatch(module: torch.nn.Module) -> None:
    """Undo :func:`watch`."""
    module._parameters = dict(module._parameters.items())


def external_parameters(module: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """The parameters that ``module`` uses and does not own, by identity. The dict itself: changes count."""
    return module.__dict__.setdefault(_EXTERNAL, {})


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Gather ``parameter`` with the parameters of ``module``, whose forward pass uses it without owning it.

    Needed only where the use cannot be seen: a parameter kept in a list, or in a closure.
    """
    external_parameters(module)[id(parameter)] = parameter


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Undo :func:`register_external_parameter`."""
    external_parameters(module).pop(id(parameter), None)
