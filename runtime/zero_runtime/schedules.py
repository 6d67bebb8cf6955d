"""Learning-rate schedules: DeepSpeed's WarmupLR, and those of torch.optim.lr_scheduler by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Final

import torch

from zero_runtime.config import SchedulerConfig
from zero_runtime.errors import ConfigError, UnsupportedError

_LATER: Final = ("WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")


class WarmupLR:
    """Raises the learning rate of each param group from a minimum to a maximum, then keeps it.

    Over ``warmup_num_steps`` steps n, the fraction of the way is log(t + 1) / log(n), or t / n with ``warmup_type`` linear.

    Args:
        optimizer: whose ``lr`` is set.
        warmup_min_lr: for all groups, or one for each.
        warmup_max_lr: likewise; None takes the optimizer's learning rates.
        warmup_num_steps: at least 1; 1 counts as 2.
        warmup_type: log or linear.
        last_batch_iteration: steps already taken, minus one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if not isinstance(warmup_num_steps, int) or warmup_num_steps < 1:
            raise ConfigError(
                f"scheduler.params.warmup_num_steps is {warmup_num_steps!r}; expected a whole number from 1"
            )
        if warmup_type not in ("log", "linear"):
            raise ConfigError(
                f"scheduler.params.warmup_type is {warmup_type!r}; expected one of: log, linear"
            )
        self.optimizer = optimizer
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        current = [group["lr"] for group in optimizer.param_groups]
        self.min_lrs = _for_each_group("warmup_min_lr", warmup_min_lr, len(current))
        self.max_lrs = (
            current
            if warmup_max_lr is None
            else _for_each_group("warmup_max_lr", warmup_max_lr, len(current))
        )
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each param group now."""
        fraction = self._fraction()
        return [low + (high - low) * fraction for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_last_lr(self) -> list[float]:
        """The learning rates set last."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """One more step has been taken; or ``last_batch_iteration`` + 1 of them."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()

    def _fraction(self) -> float:
        done = self.last_batch_iteration
        if done < 0:
            return 0.0
        if done >= self.warmup_num_steps:
            return 1.0
        if self.warmup_type == "log":
            return math.log(done + 1) / math.log(self.warmup_num_steps)
        return done / self.warmup_num_steps

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def schedule(config: SchedulerConfig | None, client: Any, optimizer: torch.optim.Optimizer) -> Any:
    """The schedule over ``optimizer``: the client's, or from the config; None where neither has one.

    Args:
        config: the ``scheduler`` block.
        client: a scheduler, or a function that makes one of the optimizer.
        optimizer: whose learning rates are set.

    Raises:
        ConfigError: an unknown type, or arguments that it does not take.
    """
    if client is not None:
        return client(optimizer) if callable(client) and not hasattr(client, "step") else client
    if config is None:
        return None
    if config.type in _LATER:
        raise UnsupportedError(
            f"scheduler.type {config.type} is not in this version yet; use WarmupLR or a class of "
            "torch.optim.lr_scheduler"
        )
    kind = WarmupLR if config.type == "WarmupLR" else getattr(torch.optim.lr_scheduler, config.type, None)
    if kind is None:
        known = ["WarmupLR", *_LATER, *(name for name in vars(torch.optim.lr_scheduler) if name[0].isupper())]
        near = get_close_matches(config.type, known, 1, 0.0)
        raise ConfigError(f"scheduler.type {config.type!r} is unknown; did you mean {near[0]!r}?")
    try:
        return kind(optimizer, **config.params)
    except TypeError as error:
        raise ConfigError(
            f"scheduler.params {dict(config.params)!r} do not fit {config.type}: {error}"
        ) from None


def _for_each_group(name: str, value: float | Sequence[float], count: int) -> list[float]:
    rates = [float(value)] * count if isinstance(value, int | float) else [float(each) for each in value]
    if len(rates) != count:
        raise ConfigError(
            f"scheduler.params.{name} has {len(rates)} values for {count} param groups; give one, or one for each"
        )
    return rates
