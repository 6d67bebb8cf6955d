"""Memory of a training step by what the tensors are for, in the ranks of step_time.py and cluster.py.

Runs under DeepSpeed's Python as well as under this project's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

MIB = 2**20


class Training(Protocol):
    """What trains: a module, its engine, and a step in one or in two."""

    module: nn.Module
    engine: Any

    def step(self) -> Any:
        """One optimizer step."""

    def forward_backward(self) -> Any:
        """A step up to the optimizer."""


def tensors(training: Training) -> dict[str, float]:
    """MiB: peak of one more step's tensors, and what the tensors are for.

    What lives between steps is found by the garbage collector; a profile of a step adds what it allocates and frees.
    """
    between = categories(training)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        training.step()
        list(training.module.parameters())  # waits for those in flight: a profile must not end before them
    peak = sum(between.values()) + _highest(profile)
    training.forward_backward()
    after_backward = categories(training)
    training.engine.step()
    return (
        {"peak_tensors": peak / MIB}
        | {f"between_{name}": value / MIB for name, value in between.items()}
        | {f"after_backward_{name}": value / MIB for name, value in after_backward.items()}
    )


def _highest(profile: Any) -> int:
    """Bytes at the highest point of the profiled allocations, above where they began."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def categories(training: Training) -> dict[str, int]:
    """Bytes of the live tensors, each storage counted once, under the first use that is known of it."""
    parameters = [_local(parameter) for parameter in training.module.parameters()]
    outer = training.engine.optimizer
    inner = getattr(outer, "optimizer", getattr(outer, "optim", outer))  # "optim": of ZeroRedundancyOptimizer
    held: dict[str, Iterable[Any]] = {
        "parameters": parameters,
        "gradients": [_local(parameter.grad) for parameter in training.module.parameters()],
        "masters": [_local(tensor) for group in inner.param_groups for tensor in group["params"]],
        "states": [_local(value) for state in inner.state.values() for value in state.values()],
        "other": _live(),
    }
    seen: set[int] = set()
    return {name: sum(_fresh(tensors, seen)) for name, tensors in held.items()}


def _local(tensor: Any) -> Any:
    """What this rank has of a DTensor, whose own storage is empty."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _live() -> list[torch.Tensor]:
    gc.collect()
    # isinstance would ask lazy modules for their class, and import them.
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def _fresh(tensors: Iterable[Any], seen: set[int]) -> Iterator[int]:
    for tensor in tensors:
        if (
            isinstance(tensor, torch.Tensor)
            and not isinstance(tensor, DTensor)  # what it has of this rank is another tensor
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
        ):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage.nbytes()
