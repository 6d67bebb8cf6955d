"""A check that every parameter gets a gradient in each step (``ignore_unused_parameters: false``)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

import torch

from zero_runtime.errors import UsageError
from zero_runtime.gradient_reduction.reducer import ParameterGroup

SHOWN: Final = 4  # names in the error


class UsedParameters:
    """Records which parameters get a gradient on this rank.

    Args:
        groups: The groups of trainable parameters.
    """

    def __init__(self, groups: Iterable[ParameterGroup]) -> None:
        self._waiting: set[str] = set()
        self._names: list[str] = []
        self._handles = []
        for group in groups:
            for name, parameter in zip(group.names, group.parameters, strict=True):
                self._names.append(name)
                hook = partial(self._see, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self.begin_step()

    def _see(self, name: str, parameter: torch.Tensor) -> None:
        self._waiting.discard(name)

    def begin_step(self) -> None:
        """Expect a gradient of every parameter in the next step."""
        self._waiting = set(self._names)

    def check(self) -> None:
        """Begin the next step.

        Raise a UsageError that names the parameters without a gradient in the step that ended.
        """
        missing = [name for name in self._names if name in self._waiting]
        self.begin_step()
        if missing:
            shown = ", ".join(missing[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
            raise UsageError(
                f"{len(missing)} of {len(self._names)} parameters got no gradient in this step: {shown}; have all of them "
                "and all outputs of forward take part in the loss, or set zero_optimization.ignore_unused_parameters "
                "to true, which treats missing gradients as zeros"
            )

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
