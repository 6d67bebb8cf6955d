"""Groups of parameters that are updated as one flat tensor.

Param groups are divided by dtype. At stage 3 they are also divided by size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from zero_runtime.configuration.blocks.zero_block import ZeroConfig
from zero_runtime.errors import ConfigError
from zero_runtime.experts.expert_groups import ExpertRanks
from zero_runtime.experts.expert_parameters import is_expert_group, parameter_names
from zero_runtime.gradient_reduction.flat_layout import PARAMETER_ALIGNMENT_BYTES, chunk_limit, group_layout
from zero_runtime.gradient_reduction.reducer import ParameterGroup
from zero_runtime.sharding.shard_layout import shard_layout, sub_groups
from zero_runtime.sharding.shards import shard_of

Named = tuple[str, torch.nn.Parameter]


def flat_groups(
    module: torch.nn.Module,
    param_groups: Sequence[dict[str, Any]],
    zero: ZeroConfig,
    world_size: int,
    chunked: bool = False,
    experts: Mapping[str, ExpertRanks] = MappingProxyType({}),
) -> list[ParameterGroup]:
    """Return the trainable parameters of each param group, in one flat buffer for each dtype (stages 1 and 2).

    The parameters of experts are partitioned over the ranks that have these experts. ``experts`` names these
    ranks.

    Raises:
        ConfigError: A group has no trainable parameter, or a parameter is in two groups.
    """
    groups = []
    for number, named in trainable(module, param_groups):
        if not named:
            raise ConfigError(
                f"param group {number} has no trainable parameter; leave it out, or pass only parameters that require "
                "gradients (layers of experts have param groups of their own)"
            )
        expert_ranks = (
            experts[param_groups[number]["name"]] if is_expert_group(param_groups[number]) else None
        )
        for alike in _by_dtype(named):
            names, parameters = zip(*alike, strict=True)
            aligned = PARAMETER_ALIGNMENT_BYTES // parameters[0].element_size()
            numels = [parameter.numel() for parameter in parameters]
            layout = group_layout(
                numels,
                world_size if expert_ranks is None else expert_ranks.data.world_size,
                round_robin=zero.round_robin_gradients,
                alignment=aligned if zero.parameter_alignment else 1,
                chunk_limit=chunk_limit(sum(numels), zero.reduce_bucket_size) if chunked else None,
            )
            groups.append(ParameterGroup(number, names, parameters, layout, expert_ranks))
    return groups


def shard_groups(
    module: torch.nn.Module, param_groups: Sequence[dict[str, Any]], limit: int, world_size: int
) -> list[ParameterGroup]:
    """Return the trainable parameters of each param group, in sub-groups (stage 3).

    A sub-group has about ``limit`` elements on each rank.

    Raises:
        ConfigError: A parameter is in two groups or is not in the model, or no parameter is trainable.
    """
    groups = []
    for number, named in trainable(module, param_groups):
        for alike in _by_dtype(named):
            numels = [_numel(name, parameter) for name, parameter in alike]
            for span in sub_groups(numels, world_size, limit):
                names, parameters = zip(*alike[span.start : span.stop], strict=True)
                layout = shard_layout(numels[span.start : span.stop], world_size)
                groups.append(ParameterGroup(number, names, parameters, layout))
    if not groups:
        raise ConfigError("no parameter is trainable; set requires_grad on those that training should change")
    return groups


def trainable(
    module: torch.nn.Module, param_groups: Iterable[dict[str, Any]]
) -> Iterator[tuple[int, list[Named]]]:
    """Yield the number of each param group and its trainable parameters with their names.

    The name of a parameter outside the module is its position in the param groups.
    """
    names = parameter_names(module)
    seen: set[torch.nn.Parameter] = set()
    for number, each in enumerate(param_groups):
        named: list[Named] = []
        for parameter in each["params"]:
            if not parameter.requires_grad:
                continue
            name = names.get(parameter, f"param_groups[{number}][{len(named)}]")
            if parameter in seen:
                raise ConfigError(f"{name} is in more than one param group; put it into one")
            seen.add(parameter)
            named.append((name, parameter))
        yield number, named


def _by_dtype(named: Iterable[Named]) -> list[list[Named]]:
    by_dtype: dict[torch.dtype, list[Named]] = {}
    for each in named:
        by_dtype.setdefault(each[1].dtype, []).append(each)
    return list(by_dtype.values())


def _numel(name: str, parameter: torch.nn.Parameter) -> int:
    shard = shard_of(parameter)
    if shard is None:
        raise ConfigError(
            f"optimizer parameter {name} is not in the model, so stage 3 cannot shard it; pass the parameters of the model "
            "that initialize gets"
        )
    return shard.numel
