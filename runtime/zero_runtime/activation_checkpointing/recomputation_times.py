"""The boundaries of a checkpointed call, at which the device is synchronized and times are printed if configured."""

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
    """The boundaries of one call: of its forward pass, of the recomputation, and of its backward pass.

    Args:
        settings: what to do there. A profile also waits for the device, since it would time the launches otherwise.
        function: for its name.
    """

    __slots__ = ("_acts", "_begun", "_function", "_profile", "_repeated")

    def __init__(self, settings: ActivationCheckpointing, function: Callable[..., Any]) -> None:
        self._profile = settings.profile
        self._acts = settings.profile or settings.synchronize_checkpoint_boundary
        self._function = name_of(function) if self._profile else ""
        self._begun = 0.0
        self._repeated = 0.0  # seconds of the recomputation

    def forward(self) -> AbstractContextManager[None]:
        """Around the forward pass."""
        return self._forward() if self._acts else _NOTHING

    def again(self) -> AbstractContextManager[None]:
        """Around the recomputation in the backward pass."""
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
        finally:  # torch ends a recomputation by an exception once it has all saved tensors
            self._repeated += self._now() - begun

    def begin_backward(self) -> None:
        """Called when the gradients of the outputs have arrived."""
        if self._acts:
            self._begun = self._now()

    def end_backward(self) -> None:
        """Called when the function's operations have been differentiated."""
        if self._acts and self._begun:
            again = f", of which {self._repeated * 1e3:.2f} ms the forward pass again"
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
    """A module's class, or a function's own name."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
