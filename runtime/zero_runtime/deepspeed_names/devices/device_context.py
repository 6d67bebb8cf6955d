"""``deepspeed.OnDevice``: construction of modules on a device and in a dtype. Also profiler ranges around functions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from zero_runtime.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class OnDevice:
    """A context that creates tensors and parameters on ``device`` and in ``dtype``.

    Args:
        dtype: The dtype of floating-point tensors.
        device: The device, such as ``cuda:0``, or ``meta``, which needs no memory.
        enabled: False makes the context do nothing.
    """

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(
                f"dtype of OnDevice is {dtype}; expected a floating-point dtype such as torch.bfloat16"
            )
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if not self.enabled:
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        self._stack.callback(torch.set_default_dtype, before)
        self._stack.enter_context(torch.device(self.device))

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``func`` so that each call runs within an NVTX range with its name, if CUDA is available."""

    @wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.cuda.is_available():
            return func(*args, **kwargs)
        with torch.cuda.nvtx.range(func.__qualname__):
            return func(*args, **kwargs)

    return call
