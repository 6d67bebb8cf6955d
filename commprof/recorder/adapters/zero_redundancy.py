"""Adapter for ZeroRedundancyOptimizer: publishes its arguments, and when it broadcasts updated parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from commprof.recorder.adapters.parts import Doubts, Part
from commprof.recorder.process.journal import Journal
from commprof.recorder.training.wrapped import Wrapped, WrappedModels

_MODULE: Final = "torch.distributed.optim.zero_redundancy_optimizer"
_CLASS: Final = "ZeroRedundancyOptimizer"


class ZeroRedundancy:
    """Follows each ZeroRedundancyOptimizer.

    Args:
        journal: The journal that receives notes on details that could not be determined.
        wrapped: The object that publishes the optimizers and their passes.
    """

    def __init__(self, journal: Journal, wrapped: WrappedModels) -> None:
        self._wrapped = wrapped
        self._doubt = Doubts(journal, _CLASS)
        self._known: weakref.WeakKeyDictionary[Any, Wrapped] = weakref.WeakKeyDictionary()

    def parts(self) -> list[Part]:
        """Return the functions to wrap, each with its wrapper."""
        return [
            Part(_MODULE, f"{_CLASS}.__init__", self._wrap_construction),
            Part(_MODULE, f"{_CLASS}.add_param_group", self._wrap_group),
            Part(_MODULE, f"{_CLASS}._sync_params", self._wrap_sending),
        ]

    def _wrap_construction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def construct(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            try:
                arguments, parameters = _described(optimizer)
                arguments |= {
                    "parameters_as_bucket_view": bool(optimizer.parameters_as_bucket_view),
                    "overlap_with_ddp": bool(optimizer._overlap_with_ddp),
                }
                self._known[optimizer] = self._wrapped.add(
                    "zero_redundancy_optimizer", "", optimizer.process_group, arguments, parameters
                )
            except Exception as error:
                self._doubt(error)

        return construct

    def _wrap_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(optimizer, *args, **kwargs)
            try:
                known = self._known.get(optimizer)
                if known is not None:
                    arguments, parameters = _described(optimizer)
                    known.set(parameters, **arguments)
            except Exception as error:
                self._doubt(error)
            return result

        return add

    def _wrap_sending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def send(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                known = self._known.get(optimizer)
                if known is not None:
                    frozen = [
                        str(at) for at, each in enumerate(_parameters(optimizer)) if not each.requires_grad
                    ]
                    groups = len(optimizer.param_groups)
                    known.ran(f"S{groups}{'-' + '.'.join(frozen) if frozen else ''};")
            except Exception as error:
                self._doubt(error)
            return original(optimizer, *args, **kwargs)

        return send


def _parameters(optimizer: Any) -> list[Any]:
    """Return the parameters of ``optimizer`` in the order of its parameter groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def _described(optimizer: Any) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return the arguments and the parameters of ``optimizer`` as they are published.

    The arguments are the number of parameters in each parameter group, and all devices of the parameters. The
    name of each parameter is its position.
    """
    parameters = _parameters(optimizer)
    arguments = {
        "groups": [len(group["params"]) for group in optimizer.param_groups],
        "devices": sorted({str(each.device) for each in parameters}),
    }
    return arguments, [(str(place), each) for place, each in enumerate(parameters)]
