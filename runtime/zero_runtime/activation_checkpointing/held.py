"""Checkpointed regions that are recomputed only once, even if their backward pass has several parts.

torch.utils.checkpoint recomputes a region in every backward pass through the region, and frees the saved
tensors when the pass ends. A pipeline with backward passes in two halves (``pipeline.split_backward``) passes
through a region many times. It passes through the region once for the gradients of the inputs, and once for the
gradients of each weight. In this module, the tensors that the second run saves exist as long as the graph of
the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch.autograd.graph import saved_tensors_hooks

from zero_runtime.errors import UsageError

_is_holding: Final[ContextVar[bool]] = ContextVar("regions_are_held", default=False)


@contextmanager
def holding(active: bool = True) -> Iterator[None]:
    """Enter a context in which regions are recomputed only once, unless ``active`` is false."""
    token = _is_holding.set(active)
    try:
        yield
    finally:
        _is_holding.reset(token)


def is_holding() -> bool:
    """Return whether a region that runs now is recomputed only once."""
    return _is_holding.get()


def run_and_drop_saved(region: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
    """Run ``region`` on ``inputs``, and drop the tensors that it saves for the backward pass.

    Args:
        region: The function to run. It is called again with tensors equal to ``inputs`` when the first saved tensor is
            needed.
        inputs: The input tensors. They are kept until the second call.
    """
    saved = _Saved(region, inputs)
    with saved_tensors_hooks(saved.drop, saved.find):
        return region(*inputs)


class _Saved:
    """The tensors that a region saves for the backward pass, by number."""

    def __init__(self, region: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        self._region = region
        self._inputs = tuple(inputs)
        self._count = 0
        self._tensors: list[torch.Tensor] | None = None
        devices = {"cpu", *(each.device.type for each in inputs)}
        self._autocast = {
            device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in devices
        }
        self._caches = torch.is_autocast_cache_enabled()

    def drop(self, tensor: torch.Tensor) -> int:
        """Drop a saved ``tensor``, and return the number that replaces it."""
        self._count += 1
        return self._count - 1

    def find(self, number: int) -> torch.Tensor:
        """Return the saved tensor with this number. The first call runs the region again."""
        if self._tensors is None:
            self._tensors = self._run_again()
        if len(self._tensors) != self._count:
            raise UsageError(
                f"a checkpointed function saved {self._count} tensors for its backward pass, and {len(self._tensors)} when "
                "it was called again; it must do the same each time"
            )
        return self._tensors[number]

    def _run_again(self) -> list[torch.Tensor]:
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> int:
            saved.append(tensor.detach())
            return len(saved) - 1

        inputs = [each.detach().requires_grad_(each.requires_grad) for each in self._inputs]
        self._inputs = ()
        with ExitStack() as stack:
            for device, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=self._caches))
            stack.enter_context(holding())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, saved.__getitem__))
            self._region(*inputs)
        return saved
