"""External parameters: parameters that are used outside the module that owns them (stage 3).

Examples are tied weights, a weight that a parent passes to a function, and a weight that a module returns. Such
a parameter is also gathered for the module that uses it. The use is detected when this module reads the
parameter in its forward pass. Other uses are registered with :func:`register_external_parameter`.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch

from zero_runtime.sharding.shards import Shard, shard_of

_EXTERNAL: Final = "zero_external_parameters"


class Reader(Protocol):
    """A module whose forward pass is running."""

    def read(self, shard: Shard) -> None:
        """Gather a parameter that the module reads but does not own."""


# The running modules of this process, innermost last. Forward passes of one process do not interleave.
running: Final[list[Reader]] = []


class WatchedParameters(dict[str, Any]):
    """The parameters of a module (``module._parameters``).

    The read of a released or unused parameter in a forward pass gathers it.

    Attributes:
        version: The number of changes.
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
    """Detect reads of parameters of ``module`` in the forward pass of another module."""
    if not isinstance(module._parameters, WatchedParameters):
        module._parameters = WatchedParameters(module._parameters)


def unwatch(module: torch.nn.Module) -> None:
    """Undo :func:`watch`."""
    module._parameters = dict(module._parameters.items())


def external_parameters(module: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """Return the parameters that ``module`` uses but does not own, by identity.

    The result is the live dict, so changes take effect.
    """
    return module.__dict__.setdefault(_EXTERNAL, {})


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Gather ``parameter`` with the parameters of ``module``, whose forward pass uses ``parameter`` without owning it.

    This is needed only if the use cannot be detected, for example if the parameter is in a list or in a
    closure.
    """
    external_parameters(module)[id(parameter)] = parameter


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Undo :func:`register_external_parameter`."""
    external_parameters(module).pop(id(parameter), None)
