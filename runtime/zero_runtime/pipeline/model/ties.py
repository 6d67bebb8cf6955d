"""Tied parameters, which several stages share. Each stage has a copy, and gradients are summed over the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime import comm
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError
from zero_runtime.groups.process_grid import PIPE, ProcessGrid
from zero_runtime.pipeline.model.layer_specs import Layer, TiedLayerSpec, draft

_BROADCAST: Final = hooks.tag("parameter_broadcast")
_LOADED: Final = hooks.tag("checkpoint")


class Tie(NamedTuple):
    """Parameters that this rank shares with other stages of its replica.

    Attributes:
        key: The key of the tied layers.
        group: The ranks of the stages that share the parameters.
        weights: The shared parameters by their names in the module.
    """

    key: str
    group: DataParallelGroup
    weights: Mapping[str, torch.nn.Parameter]


def tied_stages(layers: Sequence[Layer], bounds: Sequence[int], stages: int) -> dict[str, list[int]]:
    """Return, for each key of tied layers in sorted order, the stages that have a layer with this key.

    Args:
        layers: The layers of the model.
        bounds: The first layer of each chunk, and the end of the last chunk. Chunk p belongs to stage p modulo
            ``stages``.
        stages: The number of stages.
    """
    stages_of_key: dict[str, set[int]] = {}
    for chunk in range(len(bounds) - 1):
        for layer in layers[bounds[chunk] : bounds[chunk + 1]]:
            if isinstance(layer, TiedLayerSpec):
                stages_of_key.setdefault(layer.key, set()).add(chunk % stages)
    return {key: sorted(stages_of_key[key]) for key in sorted(stages_of_key)}


def check_ties(layers: Sequence[Layer]) -> None:
    """Raise an error if shared parameters of tied layers differ in shape or dtype.

    Raises:
        ConfigError: Shared parameters differ in shape or dtype, or a name is not the name of a parameter.
    """
    first: dict[str, TiedLayerSpec] = {}
    for layer in layers:
        if not isinstance(layer, TiedLayerSpec):
            continue
        other = first.setdefault(layer.key, layer)
        if _made_of(layer) == _made_of(other):
            continue
        mine, theirs = (
            {
                name: (tuple(weight.shape), str(weight.dtype).removeprefix("torch."))
                for name, weight in _weights(each.key, draft(each), other.tied_weight_attr)
            }
            for each in (layer, other)
        )
        for name, form in mine.items():
            if form != theirs[name]:
                raise ConfigError(
                    f"the tied layers {layer.key!r} share {name!r}, which is {theirs[name]} in {other!r} and {form} in "
                    f"{layer!r}; make them equal, or give the layers different keys"
                )


def _made_of(layer: TiedLayerSpec) -> tuple[object, ...]:
    return layer.typename, layer.module_args, tuple(layer.module_kwargs.items())


def make_ties(
    layers: Sequence[Layer],
    bounds: Sequence[int],
    modules: Mapping[str, torch.nn.Module],
    grid: ProcessGrid,
) -> list[Tie]:
    """Return the ties of this rank. All ranks must call this function.

    The first stage of each tie broadcasts its values to the other stages of the tie.

    Every copy, except the copy of the first stage, has the attribute ``ds_pipe_replicated``, as in DeepSpeed.
    The norm of all gradients skips these copies.
    """
    if grid.size(PIPE) == 1:
        return []
    attributes = {
        layer.key: layer.tied_weight_attr for layer in reversed(layers) if isinstance(layer, TiedLayerSpec)
    }
    ties = []
    for key, stages in tied_stages(layers, bounds, grid.size(PIPE)).items():
        for line in grid.topology.lines(PIPE):
            ranks = [line[stage] for stage in stages]
            handle = comm.new_group(ranks, f"pipe tie {key}")
            if grid.rank in ranks:
                group = DataParallelGroup(handle)
                tie = Tie(key, group, dict(_weights(key, modules[key], attributes[key])))
                ties.append(tie)
                _agree(tie, grid.rank != ranks[0])
    return ties


def _weights(
    key: str, module: torch.nn.Module, names: Sequence[str]
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name in names:
        attribute = module
        for attribute_name in name.split("."):
            attribute = getattr(attribute, attribute_name, None)  # type: ignore[assignment]
        if not isinstance(attribute, torch.nn.Parameter):
            raise ConfigError(
                f"tied_weight_attr {name!r} of the tied layers {key!r} is no parameter of {type(module).__name__}; expected "
                f"one of: {', '.join(each for each, _ in module.named_parameters())}"
            )
        yield name, attribute


def _agree(tie: Tie, copied: bool) -> None:
    for weight in tie.weights.values():
        tie.group.broadcast(weight.detach(), 0, why=_BROADCAST)
        weight.ds_pipe_replicated = copied  # type: ignore[attr-defined]


def synchronize(ties: Sequence[Tie]) -> None:
    """Broadcast the first stage's values again, after a checkpoint was loaded."""
    for tie in ties:
        for weight in tie.weights.values():
            tie.group.broadcast(weight.detach(), 0, why=_LOADED)


def reduce_gradients(ties: Sequence[Tie], gradient_of: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
    """Sum the gradients of shared parameters over their stages, with one all_reduce for each parameter.

    Args:
        ties: The ties of this rank.
        gradient_of: A function that returns the gradient of a parameter. The gradient is changed in place.
    """
    for tie in ties:
        for name, weight in tie.weights.items():
            if weight.requires_grad:
                why = hooks.tag("gradient_reduce", parameters=(f"tied_modules.{tie.key}.{name}",))
                tie.group.all_reduce(gradient_of(weight), why=why)
