"""Parameters of experts: their marks, their names, and their param groups for the optimizer.

The parameters of an expert have the attributes that DeepSpeed sets: ``allreduce`` is False, and
``group_name`` is the name of the groups of its ``ep_size``.

In torch's names, experts are numbered within their rank. In checkpoints and records, experts are numbered
within the layer. So a name means the same parameter on every rank and for every ``ep_size``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from zero_runtime.errors import ConfigError
from zero_runtime.experts.layer import Experts

# The number of elements of the largest param group of experts, which is the default of DeepSpeed 0.19.8.
LARGEST_GROUP: Final = 178956971
_DENSE: Final = "dense-params"


def is_expert(parameter: torch.Tensor) -> bool:
    """Return whether ``parameter`` belongs to an expert."""
    return getattr(parameter, "allreduce", True) is False


def group_of(parameter: torch.Tensor) -> str:
    """Return the name of the groups of ranks to which an expert's parameter belongs."""
    name: str = parameter.group_name  # type: ignore[attr-defined]
    return name


def ep_size(parameter: torch.Tensor) -> int | None:
    """Return the number of ranks over which the experts of ``parameter`` are divided.

    The result is None if ``parameter`` does not belong to an expert.
    """
    return int(group_of(parameter).rpartition("_")[2]) if is_expert(parameter) else None


def is_expert_group(group: Mapping[str, Any]) -> bool:
    """Return whether a param group of an optimizer contains parameters of experts."""
    return bool(group.get("moe", False))


def experts_of(module: torch.nn.Module) -> dict[str, Experts]:
    """Return the experts of each layer in ``module`` by the qualified names of the layers' ``Experts`` modules."""
    return {name: child for name, child in module.named_modules() if isinstance(child, Experts)}


def parameter_names(module: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Return the name of each parameter, with experts numbered within their layer."""
    layers = experts_of(module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    if layers:
        for parameter, name in names.items():
            for prefix, experts in layers.items():
                if name.startswith(f"{prefix}."):
                    names[parameter] = experts.global_name(prefix, name)
    return names


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of this rank, by the names of :func:`parameter_names`."""
    return {name: parameter for parameter, name in parameter_names(module).items()}


def all_names(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return a parameter for each name on any rank.

    For the name of another rank's expert, this is the parameter of this rank's expert at the same position.
    """
    layers = experts_of(module)
    everywhere = {}
    for name, parameter in named_parameters(module).items():
        everywhere[name] = parameter
        for prefix, experts in layers.items():
            if name.startswith(f"{prefix}."):
                everywhere.update(dict.fromkeys(experts.names_elsewhere(prefix, name), parameter))
    return everywhere


def names_on_ranks(module: torch.nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return, for each parameter of this rank's experts, the names of the parameters at the same position.

    There is one name for each expert-parallel rank, including this rank, in the order of the ranks.
    """
    names: dict[torch.Tensor, list[str]] = {}
    layers = experts_of(module)
    for name, parameter in named_parameters(module).items() if layers else ():
        for prefix, experts in layers.items():
            if name.startswith(f"{prefix}."):
                names[parameter] = list(experts.names_elsewhere(prefix, name))
                names[parameter].insert(experts.first // experts.num_local_experts, name)
    return names


def with_expert_groups(parameters: Sequence[Any], limit: float | None = LARGEST_GROUP) -> list[Any]:
    """Return param groups for an optimizer in which the experts of each ``ep_size`` have separate groups.

    Args:
        parameters: The tensors or param groups. If one of the param groups is already a group of experts, all
            of them are returned unchanged.
        limit: The number of elements of the largest group of experts, or None for no limit.
    """
    groups = list(parameters)
    if groups and isinstance(groups[0], torch.Tensor):
        groups = [{"params": groups, "name": _DENSE}]
    if any("moe" in group for group in groups):
        return groups
    return divided(groups, limit)


def divided(groups: Sequence[Mapping[str, Any]], limit: float | None) -> list[dict[str, Any]]:
    """Return ``groups`` without experts, followed by the param groups of the experts.

    Args:
        groups: The param groups.
        limit: The number of elements of the largest group of experts, or None for no limit.
    """
    dense: list[dict[str, Any]] = []
    of_experts: list[dict[str, Any]] = []
    listed = [(group, list(group["params"])) for group in groups]
    # The kinds are in the order of the model, because the order of a set would differ between ranks.
    kinds = dict.fromkeys(group_of(each) for _, params in listed for each in params if is_expert(each))
    for group, params in listed:
        dense.append({**group, "params": [each for each in params if not is_expert(each)]})
        for kind in kinds:
            members = [each for each in params if is_expert(each) and group_of(each) == kind]
            of_experts += [
                {**group, "name": kind, "moe": True, "params": part} for part in _parts(members, limit)
            ]
    return [*dense, *of_experts]


def _parts(
    parameters: Sequence[torch.nn.Parameter], limit: float | None
) -> Iterator[list[torch.nn.Parameter]]:
    part: list[torch.nn.Parameter] = []
    numel = 0
    for each in parameters:
        if limit is not None and numel + each.numel() > limit and part:
            yield part
            part, numel = [], 0
        part.append(each)
        numel += each.numel()
    if part:
        yield part


def check_groups(groups: Sequence[Mapping[str, Any]], names: Mapping[torch.nn.Parameter, str]) -> None:
    """Raise an error if the param groups of an optimizer do not separate experts from other parameters.

    Raises:
        ConfigError: A group of experts contains a parameter of no expert or of a different ``ep_size``, or
            the parameter of an expert is in a group that is not for experts.
    """
    instead = "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer makes such groups"
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            expected = getattr(parameter, "group_name", None) if is_expert(parameter) else None
            actual = group.get("name") if is_expert_group(group) else None
            if expected != actual:
                kind = f"for the experts of {actual}" if actual else "not for experts"
                other = f"one with moe=True and name={expected!r}" if expected else "one without moe"
                raise ConfigError(
                    f"{names.get(parameter, 'a parameter')} is in param group {number}, which is {kind}; expected {other}: "
                    f"{instead}"
                )
