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
        module: the model.
        optimizer: its optimizer (``held``, ``trained``, ``stored``, ``load_fragments``); None without one.
        scheduler: the learning-rate schedule, or None.
        loss_scale: the scale of the loss, or None.
        group: the data-parallel ranks.
        stage: the ZeRO stage.
        sharded: whether each rank's optimizer holds a different part of the parameters.
        counters: as in the manifest.
        residuals: those of gradient compression on this rank; None without error feedback.
        slices: the tensor-parallel ranks; None if this rank has complete tensors.
        experts: the groups of the model's experts, by name; empty without experts.
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
        """The parameters that the optimizer updates, on all ranks together, with their param groups."""
        return {} if self.optimizer is None else self.optimizer.trained()

    def settle(self) -> None:
        """Bring masters and parameters to the same state: wait for gathers, and copy a script's changes to the masters."""
        if self.optimizer is not None:
            self.optimizer.settle()


def parameters(training: Training) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by name: the model's, and those that only the optimizer has."""
    named = named_parameters(training.module)
    in_model = set(named.values())
    others = {name: each for name, (each, _) in training.trained.items() if each not in in_model}
    return {**named, **others}


def whole_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The shape of the complete parameter, gathered or not."""
    shard = shard_of(parameter)
    return tuple(parameter.shape if shard is None else shard.shape)


def facts(training: Training) -> dict[str, ParameterFacts]:
    """What the manifest says of each parameter, experts of other ranks included."""
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
    """The parameters of all ranks by name; for an expert of another rank, this rank's expert in its place."""
    return {**all_names(training.module), **parameters(training)}


def _cut(parameter: torch.nn.Parameter) -> tuple[int | None, tuple[int, ...]]:
    cut = cut_of(parameter)
    if cut is not None:
        return cut.dim, cut.sections
    # Scripts that partition parameters themselves set only the dimension, if anything.
    return (int(getattr(parameter, "partition_dim", 0)), ()) if is_cut(parameter) else (None, ())


def buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers, each under its first name."""
    first_names: dict[torch.Tensor, str] = {}
    for name, buffer in _persistent_buffers(module):
        first_names.setdefault(buffer, name)
    return {name: buffer for buffer, name in first_names.items()}


def aliases(module: torch.nn.Module) -> dict[str, str]:
    """Further names of tied parameters and shared buffers, and their first names."""
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
    """The modules that keep state besides parameters and buffers (``get_extra_state``), by name."""
    for name, child in module.named_modules():
        if type(child).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, child


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
