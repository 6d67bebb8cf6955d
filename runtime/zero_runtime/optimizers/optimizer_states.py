"""Base classes of this package's optimizers, which have state tensors of the shape of each parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zero_runtime.errors import ConfigError


class MomentOptimizer(torch.optim.Optimizer):
    """A torch optimizer with state tensors of the shape of each parameter.

    Attributes:
        moments: The names of the state tensors.
    """

    moments: tuple[str, ...] = ()

    def moments_of(self, tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield, for each name in ``moments``, the list of these state tensors of ``tensors``.

        State tensors that do not exist yet are created as zeros.
        """
        for tensor in tensors:
            state = self.state[tensor]
            for name in self.moments:
                if name not in state:
                    state[name] = torch.zeros_like(tensor, requires_grad=False)
        for name in self.moments:
            yield [self.state[tensor][name] for tensor in tensors]


class GroupwiseOptimizer(MomentOptimizer, ABC):
    """An optimizer that updates all tensors of a param group at once, one group after another."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: A function that computes the loss and its gradients again.

        Returns:
            The value of ``closure``, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            tensors = [each for each in group["params"] if each.grad is not None]
            if tensors:
                self.update(group, tensors)
        return loss

    @abstractmethod
    def update(self, group: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Update ``tensors`` of ``group``, which all have gradients."""


def check_hyperparameters(lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    """Refuse values outside of their valid ranges.

    Raises:
        ConfigError: A value is outside of its range. The message names the value and the range.
    """
    if not lr >= 0.0:
        raise ConfigError(f"optimizer.params.lr is {lr!r}; expected a number from 0")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(
            f"optimizer.params.betas are {list(betas)!r}; expected two numbers from 0 and below 1"
        )
    if not weight_decay >= 0.0:
        raise ConfigError(f"optimizer.params.weight_decay is {weight_decay!r}; expected a number from 0")
