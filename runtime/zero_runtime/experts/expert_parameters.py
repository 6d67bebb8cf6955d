"""Parameters of experts: how they are marked, named and grouped for the optimizer.

An expert's parameters carry DeepSpeed's marks: ``allreduce`` is False, and ``group_name`` names the groups of its
``ep_size``.
In torch's names experts are numbered within their rank. Checkpoints and records number them within the layer, so that a
name means the same parameter on every rank and at every ``ep_size``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from zero_runtime.errors import ConfigError
from zero_runtime.experts.layer import Experts

# Elements of the largest param group of experts, DeepSpeed 0.19.8's default.
LARGEST_GROUP: Final = 178956971
_DENSE: Final = "dense-params"


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is one of an expert."""
    return getattr(parameter, "allreduce", True) is False


def group_of(parameter: torch.Tensor) -> str:
    """The name of the groups of ranks of an expert's parameter."""
    name: str = parameter.group_name  # type: ignore[attr-defined]
    return name


def ep_size(parameter: torch.Tensor) -> int | None:
    """The ranks that the experts of ``parameter`` are divided over; None if it is not an expert's."""
    return int(group_of(parameter).rpartition("_")[2]) if is_expert(parameter) else None


def is_expert_group(group: Mapping[str, Any]) -> bool:
    """Whether an optimizer's param group has the parameters of experts."""
    return bool(group.get("moe", False))


def experts_of(module: torch.nn.Module) -> dict[str, Experts]:
    """The experts of each layer in ``module``, by qualified name."""
    return {name: child for name, child in module.named_modules() if isinstance(child, Experts)}


def parameter_names(module: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """The name of each parameter, with experts numbered within their layer."""
    layers = experts_of(module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    if layers:
        for parameter, name in names.items():
            for prefix, experts in layers.items():
                if name.startswith(f"{prefix}."):
                    names[parameter] = experts.global_name(prefix, name)
    return names


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of this rank by those names."""
    return {name: parameter for parameter, name in parameter_names(module).items()}


def all_names(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of all ranks by name; for an expert of another rank, this rank's expert in its place."""
    layers = experts_of(module)
    everywhere = {}
    for name, parameter in named_parameters(module).items():
        everywhere[name] = parameter
        for prefix, experts in layers.items():
            if name.startswith(f"{prefix}."):
                everywhere.update(dict.fromkeys(experts.names_elsewhere(prefix, name), parameter))
    return everywhere


def names_on_ranks(module: torch.nn.Module) -> dict[torch.Tensor, list[str]]:
    """Of each parameter of this rank's experts, the names of those in the same place on each rank with other experts."""
    names: dict[torch.Tensor, list[str]] = {}
    layers = experts_of(module)
    for name, parameter in named_parameters(module).items() if layers else ():
        for prefix, experts in layers.items():
            if name.startswith(f"{prefix}."):
                names[parameter] = list(experts.names_elsewhere(prefix, name))
                names[parameter].insert(experts.first // experts.num_local_experts, name)
    return names


def with_expert_groups(parameters: Sequence[Any], limit: float | None = LARGEST_GROUP) -> list[Any]:
    """Param groups for an optimizer in which the experts of each ``ep_size`` have groups of their own.

    Args:
        parameters: tensors or param groups. If one of these is a group of experts already, all are returned unchanged.
        limit: elements of the largest group of experts; None for no limit.
    """
    groups = list(parameters)
    if groups and isinstance(groups[0], torch.Tensor):
        groups = [{"params": groups, "name": _DENSE}]
    if any("moe" in group for group in groups):
        return groups
    return divided(groups, limit)


def divided(groups: Sequence[Mapping[str, Any]], limit: float | None) -> list[dict[str, Any]]:
    """``groups`` without experts, followed by those of their experts; as :func:`with_expert_groups`."""
    dense: list[dict[str, Any]] = []
    of_experts: list[dict[str, Any]] = []
    listed = [(group, list(group["params"])) for group in groups]
    # In the order of the model: an unordered set would differ between ranks.
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
    """Refuse an optimizer that does not keep experts apart.

    Raises:
        ConfigError: a group of experts has another parameter, or one with another ``ep_size``; or an expert's parameter is
            in another group.
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
