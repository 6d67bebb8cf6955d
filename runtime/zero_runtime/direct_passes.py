"""Passes of a model that a program calls itself, not the engine around it: evaluations, and the generation of tokens."""

from __future__ import annotations

from typing import Any

import torch

from commprof import hooks


class DirectPasses:
    """Says that such a pass without gradients is an evaluation.

    Trainers evaluate the model that they gave to initialize.
    """

    def __init__(self) -> None:
        self._saying = False

    def watch(self, module: torch.nn.Module) -> None:
        """Watch ``module``, once for all engines that it has had."""
        for hook in module._forward_pre_hooks.values():
            if isinstance(getattr(hook, "__self__", None), DirectPasses):
                return
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

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
