"""Detection of forward passes that a program runs on the model directly, for evaluation or token generation."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from commprof import hooks

# The handles are not an attribute of _DirectPasses, because copying or pickling a module includes its hooks, and
# handles must not be copied or pickled.
_handles: Final[WeakKeyDictionary[torch.nn.Module, tuple[RemovableHandle, ...]]] = WeakKeyDictionary()


def watch(module: torch.nn.Module) -> None:
    """Report each forward pass of ``module`` without gradients and outside of a step as the phase ``evaluation``.

    Such passes occur because trainers evaluate the model that they passed to ``initialize``.
    """
    unwatch(module)
    passes = _DirectPasses()
    _handles[module] = (
        module.register_forward_pre_hook(passes._begin),
        module.register_forward_hook(passes._end, always_call=True),
    )


def unwatch(module: torch.nn.Module) -> None:
    """Stop reporting the forward passes of ``module``, and remove the hooks of :func:`watch`."""
    for handle in _handles.pop(module, ()):
        handle.remove()


class _DirectPasses:
    def __init__(self) -> None:
        self._saying = False

    def _begin(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or hooks.position.phase != "other":
            return
        if not (module.training and torch.is_grad_enabled()):
            self._saying = True
            hooks.phase("evaluation")

    def _end(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._saying and not torch.compiler.is_compiling():
            self._saying = False
            hooks.phase("other")
