"""A profile of the layers of a pipeline, measured on rank 0, for the partition by time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError
from zero_runtime.pipeline.model.layer_specs import Layer, LayerSpec, TiedLayerSpec, name_of

_METRIC: Final = hooks.tag("metric")
ROUNDS: Final = 3


def layer_seconds(layers: Sequence[Layer], sample: Any) -> list[float]:
    """Return the seconds of one forward and backward pass of each layer.

    The times are medians of three passes on rank 0, which rank 0 sends to all ranks.

    Args:
        layers: The layers, which are built one at a time.
        sample: An input of the first layer.

    Raises:
        ConfigError: There is no sample, or a layer fails on its input.
    """
    group = DataParallelGroup()
    if sample is None:
        raise ConfigError(
            "partition_method profile runs the layers, and there is nothing to run them on; give PipelineModule a "
            "sample_input, or initialize training_data"
        )
    measured = torch.full((len(layers),), -1.0, dtype=torch.float64, device=group.device)
    error = None
    if group.rank == 0:
        with torch.random.fork_rng():
            try:
                measured = torch.tensor(
                    _measure(layers, sample, group.device), dtype=torch.float64, device=group.device
                )
            except ConfigError as raised:
                error = raised
    group.broadcast(measured, 0, why=_METRIC)
    if error is not None:
        raise error
    seconds: list[float] = measured.tolist()
    if min(seconds) < 0:
        raise ConfigError(
            "partition_method profile failed on rank 0; see the message of rank 0 for the reason"
        )
    return seconds


def _measure(layers: Sequence[Layer], sample: Any, device: torch.device) -> list[float]:
    seconds = []
    tied: dict[str, torch.nn.Module] = {}
    values = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, sample)
    for number, layer in enumerate(layers):
        try:
            layer_time, values = _time(_runnable(layer, tied, device), values, device)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"partition_method profile: layer {number} ({name_of(layer)}) does not run on the sample: {error}"
            ) from error
        seconds.append(layer_time)
    return seconds


def _runnable(layer: Layer, tied: dict[str, torch.nn.Module], device: torch.device) -> Callable[[Any], Any]:
    """Return the layer, which is built if necessary.

    Tied layers with the same key use the first of them, which is stored in ``tied``.
    """
    if isinstance(layer, TiedLayerSpec):
        if layer.key not in tied:
            tied[layer.key] = layer.build().to(device)
        module = tied[layer.key]
        return module if layer.forward_fn is None else partial(layer.forward_fn, module)
    built = layer.build() if isinstance(layer, LayerSpec) else layer
    return built.to(device) if isinstance(built, torch.nn.Module) else built


def _time(run: Callable[[Any], Any], inputs: Any, device: torch.device) -> tuple[float, Any]:
    """Return the median time of a forward and backward pass in seconds, and the detached outputs."""
    rounds = []
    outputs = None
    for _ in range(ROUNDS):
        leaf_inputs = tree_map(_leaf, inputs)
        _wait(device)
        start = time.perf_counter()
        outputs = run(leaf_inputs)
        ends = [
            each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
        _wait(device)
        rounds.append(time.perf_counter() - start)
    if isinstance(run, torch.nn.Module):
        run.zero_grad()
    return statistics.median(rounds), tree_map(_detached, outputs)


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.is_floating_point())
    return value


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
