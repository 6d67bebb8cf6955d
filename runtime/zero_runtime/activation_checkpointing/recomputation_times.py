"""The boundaries of a checkpointed call, at which the settings can synchronize the device and print times."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from zero_runtime import comm, log
from zero_runtime.configuration.blocks.activation_block import ActivationCheckpointing

_NOTHING: Final = nullcontext()


class Boundaries:
    """The boundaries of the forward pass, the recomputation and the backward pass of one call.

    Args:
        settings: The settings, which determine what happens at a boundary. With ``profile``, a boundary also
            waits for the device, because the times would otherwise be those of the kernel launches.
        function: The checkpointed function, whose name is printed.
    """

    __slots__ = ("_acts", "_begun", "_function", "_profile", "_repeated")

    def __init__(self, settings: ActivationCheckpointing, function: Callable[..., Any]) -> None:
        self._profile = settings.profile
        self._acts = settings.profile or settings.synchronize_checkpoint_boundary
        self._function = name_of(function) if self._profile else ""
        self._begun = 0.0
        self._repeated = 0.0  # seconds of the recomputation

    def forward(self) -> AbstractContextManager[None]:
        """Return the context manager for the forward pass."""
        return self._forward() if self._acts else _NOTHING

    def again(self) -> AbstractContextManager[None]:
        """Return the context manager for the recomputation in the backward pass."""
        return self._again() if self._acts else _NOTHING

    @contextmanager
    def _forward(self) -> Iterator[None]:
        begun = self._now()
        yield
        self._print("forward", self._now() - begun)

    @contextmanager
    def _again(self) -> Iterator[None]:
        begun = self._now()
        if not self._begun:
            self._begun = begun
        try:
            yield
        finally:  # torch raises an exception to stop a recomputation when all saved tensors are available
            self._repeated += self._now() - begun

    def begin_backward(self) -> None:
        """Record the start of the backward pass, when the gradients of the outputs are available."""
        if self._acts:
            self._begun = self._now()

    def end_backward(self) -> None:
        """Print the time of the backward pass, after the backward pass of all operations of the function."""
        if self._acts and self._begun:
            again = f", including {self._repeated * 1e3:.2f} ms for the repeated forward pass"
            self._print("backward", self._now() - self._begun, again)
            self._begun = self._repeated = 0.0

    def _now(self) -> float:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _print(self, pass_name: str, seconds: float, more: str = "") -> None:
        if self._profile and (not comm.is_initialized() or comm.get_rank() == 0):
            log.info(f"checkpoint of {self._function}: {pass_name} {seconds * 1e3:.2f} ms{more}")


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of the class of a module, or the name of a function."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
