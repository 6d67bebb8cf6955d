"""Wrappers for which ``commprof.requested`` has no rules: that they are there is published, and no more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from commprof.recorder.adapters.parts import Doubts, Part
from commprof.recorder.journal import Journal
from commprof.recorder.wrapped import WrappedModels

_ZERO: Final = "torch.distributed.optim.zero_redundancy_optimizer"
_TENSORS: Final = "torch.distributed.tensor.parallel"


class Unruled:
    """Tells of ZeroRedundancyOptimizer and of tensor parallelism.

    Args:
        journal: hears of what could not be found out.
        wrapped: publishes them.
    """

    def __init__(self, journal: Journal, wrapped: WrappedModels) -> None:
        self._wrapped = wrapped
        self._doubt = Doubts(journal, "torch.distributed")

    def parts(self) -> list[Part]:
        """What to wrap."""
        return [
            Part(_ZERO, "ZeroRedundancyOptimizer.__init__", self._wrap_optimizer),
            # The package has taken the name over from the module that defines it.
            Part(_TENSORS, "parallelize_module", self._wrap_tensors, optional=True),
            Part(f"{_TENSORS}.api", "parallelize_module", self._wrap_tensors, optional=True),
        ]

    def _wrap_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def construct(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            try:
                group = optimizer.process_group or dist.group.WORLD
                self._wrapped.add("zero_redundancy_optimizer", "", group, {}, ())
            except Exception as error:
                self._doubt(error)

        return construct

    def _wrap_tensors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def parallelize(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            try:
                given = signature.bind(*args, **kwargs).arguments
                mesh, plan = given.get("device_mesh"), given.get("parallelize_plan")
                if mesh is not None and mesh.ndim == 1:
                    named = plan if isinstance(plan, dict) else {"": plan}
                    told = {str(name): type(style).__name__ for name, style in named.items()}
                    self._wrapped.add("tensor_parallel", "", mesh.get_group(), {"plan": told}, ())
            except Exception as error:
                self._doubt(error)
            return result

        return parallelize
