"""The choice of the learning-rate schedule: the schedule of the script, or the one in the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final

import torch

from zero_runtime.configuration.config_values import SchedulerConfig
from zero_runtime.configuration.reading.argument_signatures import check_arguments
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.schedules.one_cycle import OneCycle
from zero_runtime.schedules.range_test import LRRangeTest
from zero_runtime.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

_OWN: Final[Mapping[str, type]] = {
    each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def schedule(config: SchedulerConfig | None, client: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the schedule of ``optimizer``, from the script or the configuration; None if neither sets a schedule.

    Args:
        config: The ``scheduler`` block of the configuration.
        client: A scheduler, or a function or class that creates one for the optimizer. It overrides ``config``.
        optimizer: The optimizer whose learning rates are set.

    Raises:
        ConfigError: The type is unknown or does not take the given arguments, or ``client`` is not a scheduler.
    """
    if client is not None:
        makes = isinstance(client, type) or (callable(client) and not hasattr(client, "step"))
        scheduler = _of_optimizer(client, optimizer) if makes else client
        if not hasattr(scheduler, "step"):
            raise ConfigError(
                f"lr_scheduler is a {type(client).__name__}; expected a scheduler with a step method, or a function that "
                "takes the optimizer and returns one"
            )
        return scheduler
    if config is None:
        return None
    kind = _kind(config.type)
    check_arguments("scheduler.params", kind, config.params)
    try:
        return kind(optimizer, **config.params)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"scheduler.params {dict(config.params)!r} do not fit {config.type}: {error}"
        ) from None


def advance(scheduler: Any, arguments: Mapping[str, Any], samples: int) -> None:
    """Step ``scheduler`` with ``arguments``.

    If ``arguments`` is empty and the method ``step`` requires an argument, the method gets ``samples``, the number of
    samples in a training step. DeepSpeed does the same for the schedules of Megatron-LM, which count samples.

    Raises:
        UsageError: The schedule needs a metric, and ``arguments`` has none.
    """
    if arguments or not _needs_argument(scheduler.step):
        scheduler.step(**arguments)
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            "the schedule ReduceLROnPlateau needs a metric in each step; call engine.step(lr_kwargs={'metrics': loss})"
        )
    scheduler.step(samples)


def _needs_argument(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # a C function has no signature
        return False
    return False


def _of_optimizer(make: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer) -> Any:
    """Return the result of the script's ``make``. Raises ConfigError if the call needs other arguments."""
    try:
        inspect.signature(make).bind(optimizer)
    except TypeError as error:
        name = getattr(make, "__name__", type(make).__name__)
        raise ConfigError(
            f"lr_scheduler is {name}, which cannot be called with the optimizer alone: {error}; give a scheduler, or a "
            f"function such as lambda optimizer: {name}(optimizer, ...)"
        ) from None
    except ValueError:
        pass  # a C function has no signature
    return make(optimizer)


def _kind(name: str) -> type:
    classes = dict(_OWN)
    for other, value in vars(torch.optim.lr_scheduler).items():
        if isinstance(value, type) and issubclass(value, torch.optim.lr_scheduler.LRScheduler):
            classes.setdefault(other, value)
    if name not in classes or name == "LRScheduler":
        near = get_close_matches(name, classes, 1, 0.0)
        raise ConfigError(
            f"scheduler.type {name!r} is unknown; did you mean {near[0]!r}? It is one of {', '.join(_OWN)}, or a class of "
            "torch.optim.lr_scheduler"
        )
    return classes[name]
