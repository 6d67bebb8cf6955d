"""Overlap of the parameter gather after a step with the next forward pass (``overlap_parameter_gather``).

A step only starts the gather. While the gather is in flight, each access to a parameter through its module
waits for the messages that carry a part of the parameter. The forward pass of a module that owns the parameter
waits too, because some modules also keep their parameters in lists. Only one access is unsafe: code that reads
the ``data`` of a reference that the program stored elsewhere may read old values.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any, Protocol

import torch


class Message(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Wait until the collective is complete."""


class Arrivals:
    """Waits for the messages that carry a parameter when the parameter is needed.

    Args:
        module: The model.
        carriers: The numbers of the messages that carry a part of each parameter.
    """

    def __init__(self, module: torch.nn.Module, carriers: Mapping[torch.nn.Parameter, Sequence[int]]) -> None:
        self._carriers = carriers
        self._under_way: dict[int, Message] = {}
        self._owners = [
            (owner, owner._parameters)
            for owner in module.modules()
            if any(parameter in carriers for parameter in owner.parameters(recurse=False))
        ]
        hook = _BeforeForward(self)
        self._handles = [owner.register_forward_pre_hook(hook) for owner, _ in self._owners]

    def close(self) -> None:
        """Wait for all messages and remove the hooks."""
        self.land_all()
        for handle in self._handles:
            handle.remove()

    def expect(self, messages: Sequence[Message]) -> None:
        """Register ``messages``, which are in flight. They are numbered from 0."""
        self._under_way = dict(enumerate(messages))
        for owner, plain in self._owners:
            owner._parameters = _Watched(plain, self)

    def land(self, parameter: torch.nn.Parameter | None) -> None:
        """Wait for the messages that carry ``parameter``."""
        if not self._under_way or parameter is None:
            return
        for number in self._carriers.get(parameter, ()):
            message = self._under_way.pop(number, None)
            if message is not None:
                message.wait()
        if not self._under_way:
            self._restore()

    def land_all(self) -> None:
        """Wait for all messages in flight."""
        if not self._under_way:
            return
        for number in sorted(self._under_way):
            self._under_way.pop(number).wait()
        self._restore()

    def _restore(self) -> None:
        for owner, plain in self._owners:
            watched = owner._parameters
            if isinstance(watched, _Watched):
                plain.clear()
                plain.update(watched.without_waiting())
                owner._parameters = plain


class _BeforeForward:
    """The forward pre-hook of modules that own parameters. A copy of the hook, in a copied module, does nothing."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        for parameter in list(module._parameters.values()):
            self._arrivals.land(parameter)

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing:
    """A hook that does nothing."""

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        """Do nothing."""


class _Watched(dict[str, Any]):
    """The parameters of a module while some of them are in flight."""

    def __init__(self, plain: Mapping[str, Any], arrivals: Arrivals) -> None:
        super().__init__(plain)
        self._arrivals = arrivals

    def without_waiting(self) -> dict[str, Any]:
        """Return a copy as a plain dictionary."""
        return dict(super().items())

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._arrivals.land(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value as ``dict.get`` does, after the parameter has arrived."""
        parameter = super().get(name, default)
        if name in self:
            self._arrivals.land(parameter)
        return parameter

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return the items as ``dict.items`` does, after all parameters of the module have arrived."""
        self._land_mine()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Return the values as ``dict.values`` does, after all parameters of the module have arrived."""
        self._land_mine()
        return super().values()

    def _land_mine(self) -> None:
        for parameter in list(super().values()):
            self._arrivals.land(parameter)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[dict[str, Any]], tuple[Iterator[Any]]]:
        # A copied or pickled module stores its parameters in a plain dictionary.
        return dict, (list(self.items()),)  # type: ignore[return-value]
