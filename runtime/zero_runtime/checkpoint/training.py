"""The parts of an engine that a checkpoint saves and loads, and the names of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from zero_runtime.checkpoint.files.checkpoint_manifest import ParameterFacts
from zero_runtime.comm import DataParallelGroup
from zero_runtime.experimental.compression.residuals import Residuals
from zero_runtime.experts.expert_groups import ExpertRanks
from zero_runtime.experts.expert_parameters import all_names, named_parameters
from zero_runtime.groups.parallelism import is_cut
from zero_runtime.sharding.shards import shard_of
from zero_runtime.tensor_parallel.cuts import cut_of


class Training(NamedTuple):
    """The parts of an engine that a checkpoint stores.

    Attributes:
        module: The model.
        optimizer: The wrapped optimizer of the model (``trained``, ``stored``, ``load_fragments``, ``settle``).
            None without an optimizer.
        scheduler: The learning-rate schedule, or None.
        loss_scale: The scale of the loss, or None.
        group: The group of the data-parallel ranks.
        stage: The ZeRO stage.
        sharded: Whether the optimizer of each rank has a different part of the parameters.
        counters: The counters, as in the manifest.
        residuals: The residuals of gradient compression on this rank. None without error feedback.
        slices: The group of the tensor-parallel ranks. None if this rank has complete tensors.
        experts: The groups of the model's experts, by name. Empty without experts.
    """

    module: torch.nn.Module
    optimizer: Any
    scheduler: Any
    loss_scale: Any
    group: DataParallelGroup
    stage: int
    sharded: bool
    counters: Mapping[str, int]
    residuals: Residuals | None = None
    slices: DataParallelGroup | None = None
    experts: Mapping[str, ExpertRanks] = MappingProxyType({})

    @property
    def trained(self) -> dict[str, tuple[torch.nn.Parameter, int]]:
        """The parameters that all ranks together update, by name, with the number of their param group."""
        return {} if self.optimizer is None else self.optimizer.trained()

    def settle(self) -> None:
        """Bring masters and parameters to the same state.

        Wait for gathers, and copy changes that a script has made to the masters.
        """
        if self.optimizer is not None:
            self.optimizer.settle()


def parameters(training: Training) -> dict[str, torch.nn.Parameter]:
    """Return this rank's parameters by name: those of the model, and those that only the optimizer has."""
    named = named_parameters(training.module)
    in_model = set(named.values())
    others = {name: each for name, (each, _) in training.trained.items() if each not in in_model}
    return {**named, **others}


def whole_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the complete parameter, whether or not it is gathered."""
    shard = shard_of(parameter)
    return tuple(parameter.shape if shard is None else shard.shape)


def facts(training: Training) -> dict[str, ParameterFacts]:
    """Return the manifest's entry for each parameter, including experts of other ranks."""
    groups = dict(training.trained.values())
    return {
        name: ParameterFacts(
            whole_shape(parameter),
            str(parameter.dtype).removeprefix("torch."),
            groups.get(parameter),
            parameter.requires_grad,
            *_cut(parameter),
        )
        for name, parameter in everywhere(training).items()
    }


def everywhere(training: Training) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of all ranks by name. An expert of another rank is represented by this rank's expert."""
    return {**all_names(training.module), **parameters(training)}


def _cut(parameter: torch.nn.Parameter) -> tuple[int | None, tuple[int, ...]]:
    cut = cut_of(parameter)
    if cut is not None:
        return cut.dim, cut.sections
    # Scripts that partition parameters themselves set at most the dimension.
    return (int(getattr(parameter, "partition_dim", 0)), ()) if is_cut(parameter) else (None, ())


def buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers, each under its first name."""
    first_names: dict[torch.Tensor, str] = {}
    for name, buffer in _persistent_buffers(module):
        first_names.setdefault(buffer, name)
    return {name: buffer for buffer, name in first_names.items()}


def aliases(module: torch.nn.Module) -> dict[str, str]:
    """Return the additional names of tied parameters and shared buffers, with the first name of each."""
    first: dict[torch.Tensor, str] = {}
    further = {}
    everything = [*module.named_parameters(remove_duplicate=False), *_persistent_buffers(module)]
    for name, tensor in everything:
        if tensor in first:
            further[name] = first[tensor]
        else:
            first[tensor] = name
    return further


def extra_states(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that have state besides parameters and buffers (``get_extra_state``), by name."""
    for name, child in module.named_modules():
        if type(child).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, child


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
