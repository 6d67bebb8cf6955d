"""Measures the memory of a training step by purpose of the tensors, in the ranks of step_time.py and cluster.py.

The module runs in the Python environment of DeepSpeed and in that of this project.
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
    """A module and its engine, which can run a training step as a whole or without the optimizer."""

    module: nn.Module
    engine: Any

    def step(self) -> Any:
        """Run one optimizer step."""

    def forward_backward(self) -> Any:
        """Run the forward and backward pass of a step."""


def tensors(training: Training) -> dict[str, float]:
    """Run two more steps; return the peak size of the tensors and their sizes by purpose, in MiB.

    The tensors that exist between steps are found through the garbage collector. A profile of one step adds the
    allocations and frees of the step.
    """
    between = categories(training)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        training.step()
        # This waits for parameters that are still being gathered, because the profile must include their allocations.
        list(training.module.parameters())
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
    """Return the peak of the profiled allocations in bytes, relative to the begin of the profile."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def categories(training: Training) -> dict[str, int]:
    """Return the bytes of the live tensors by purpose.

    Each storage counts once, for the first purpose in the order parameters, gradients, masters, states, other.
    """
    parameters = [_local(parameter) for parameter in training.module.parameters()]
    outer = training.engine.optimizer
    # ZeroRedundancyOptimizer has the attribute "optim".
    inner = getattr(outer, "optimizer", getattr(outer, "optim", outer))
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
    """Return the local tensor of a DTensor, whose own storage is empty. Other values are returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _live() -> list[torch.Tensor]:
    gc.collect()
    # isinstance would access the class of lazy modules, and thereby import them.
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def _fresh(tensors: Iterable[Any], seen: set[int]) -> Iterator[int]:
    for tensor in tensors:
        if (
            isinstance(tensor, torch.Tensor)
            and not isinstance(tensor, DTensor)  # its local tensor is a separate object
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
        ):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage.nbytes()
