"""External parameters: parameters used outside the module that owns them (stage 3).

Examples are tied weights, a weight that a parent passes to a function, and a weight that a module returns. Such a parameter
is gathered for the module that uses it too. It is detected when that module reads it in its forward pass, or registered by
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
        """Gather a parameter that the module reads and does not own."""


# The running modules of this process, innermost last. Forward passes of one process do not interleave.
running: Final[list[Reader]] = []


class WatchedParameters(dict[str, Any]):
    """The parameters of a module (``module._parameters``); reading a released or unused one in a forward pass gathers it.

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
            if shard is not None and not (shard.available and shard.active):
                running[-1].read(shard)
        return parameter


def watch(module: torch.nn.Module) -> None:
    """Detect reads of parameters of ``module`` in another module's forward pass."""
    if not isinstance(module._parameters, WatchedParameters):
        module._parameters = WatchedParameters(module._parameters)


def unwatch(module: torch.nn.Module) -> None:
    """Undo :func:`watch`."""
    module._parameters = dict(module._parameters.items())


def external_parameters(module: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """The parameters that ``module`` uses and does not own, by identity. This is the live dict: changes take effect."""
    return module.__dict__.setdefault(_EXTERNAL, {})


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Gather ``parameter`` with the parameters of ``module``, whose forward pass uses it without owning it.

    Needed only if the use cannot be detected: a parameter in a list or in a closure.
    """
    external_parameters(module)[id(parameter)] = parameter


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Undo :func:`register_external_parameter`."""
    external_parameters(module).pop(id(parameter), None)
