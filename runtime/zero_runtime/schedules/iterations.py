"""The base class of DeepSpeed's schedules, in which learning rates are a function of the number of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from zero_runtime.errors import ConfigError


class IterationSchedule(ABC):
    """A schedule that sets the learning rate of each param group after each optimizer step.

    The attribute ``last_batch_iteration`` is the number of the last step, counted from 0. It is -1 before the
    first step.

    Args:
        optimizer: The optimizer whose ``lr`` is set.
        last_batch_iteration: The number of the step after which the schedule continues. Only with -1 does the
            constructor set the optimizer's learning rates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = whole_number("last_batch_iteration", last_batch_iteration, -1)
        self._last_lr = [float(group["lr"]) for group in optimizer.param_groups]

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the current learning rate of each param group."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that were set last."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count one more step, or set the count to ``last_batch_iteration`` + 1 steps, and set the learning rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for ``load_state_dict``."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``, which :meth:`state_dict` returned."""
        self.last_batch_iteration = state["last_batch_iteration"]
        if self.last_batch_iteration >= 0:
            self._apply()

    def _apply(self) -> None:
        self._set(self.get_lr())

    def _set(self, rates: Sequence[float]) -> None:
        self._last_lr = list(rates)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def for_each_group(name: str, value: float | Sequence[float], count: int) -> list[float]:
    """Return ``value`` as a list with one number for each of ``count`` param groups.

    Args:
        name: The name of the argument, for the error message.
        value: One number for all param groups, or one number for each.
        count: The number of param groups.

    Raises:
        ConfigError: The number of values is not ``count``.
    """
    rates = [float(value)] * count if isinstance(value, int | float) else [float(each) for each in value]
    if len(rates) != count:
        raise ConfigError(
            f"scheduler.params.{name} has {len(rates)} values for {count} param groups; give one, or one for each"
        )
    return rates


def whole_number(name: str, value: Any, least: int) -> int:
    """Return ``value`` after a check that it is an integer of at least ``least``.

    Raises:
        ConfigError: ``value`` is not such an integer.
    """
    if isinstance(value, float) and value.is_integer():  # JSON with an exponent, such as 1e5
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"scheduler.params.{name} is {value!r}; expected a whole number from {least}")
    return value


def at_least(name: str, value: float, least: float, exclusive: bool = False) -> float:
    """Return ``value`` after a check that it is at least ``least`` or, with ``exclusive``, greater than ``least``.

    Raises:
        ConfigError: ``value`` is too small.
    """
    if not value >= least or (exclusive and value == least):
        bound = "above" if exclusive else "from"
        raise ConfigError(f"scheduler.params.{name} is {value!r}; expected a number {bound} {least:g}")
    return value
