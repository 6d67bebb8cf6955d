"""``deepspeed.moe.utils``: functions that find the parameters and param groups of experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zero_runtime.errors import ConfigError
from zero_runtime.experts import expert_parameters
from zero_runtime.experts.layer import MoE

is_moe_param = expert_parameters.is_expert
is_moe_param_group = expert_parameters.is_expert_group


def has_moe_layers(m: torch.nn.Module) -> tuple[bool, int]:
    """Return (whether the model has experts, the number of experts of the first layer that has experts)."""
    layer = next((child for child in m.modules() if isinstance(child, MoE)), None)
    return layer is not None, 0 if layer is None else layer.num_experts


def split_params_into_shared_and_expert_params(
    params: Iterable[torch.nn.Parameter],
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return (the parameters that do not belong to experts, the parameters of experts)."""
    everything = list(params)
    return [each for each in everything if not is_moe_param(each)], [
        each for each in everything if is_moe_param(each)
    ]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]],
    max_group_size: float | None = expert_parameters.LARGEST_GROUP,
) -> list[dict[str, Any]]:
    """Return param groups in which the parameters of experts are in separate groups for each ``ep_size``.

    Args:
        param_groups: One param group or several.
        max_group_size: The maximum number of elements in a param group of experts; None for no limit.

    Raises:
        ConfigError: A param group is not a dict with the key ``params``.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for each in groups:
        if not isinstance(each, dict) or "params" not in each:
            raise ConfigError(f"param group {each!r} is a {type(each).__name__}; expected a dict with params")
        params = each["params"]
        each["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    return expert_parameters.divided(groups, max_group_size)


def configure_moe_param_groups(model_parameters: Sequence[Any]) -> list[Any]:
    """Return param groups for ``model_parameters``, in which the parameters of experts are in separate groups.

    Args:
        model_parameters: Tensors or param groups.
    """
    return expert_parameters.with_expert_groups(model_parameters)
