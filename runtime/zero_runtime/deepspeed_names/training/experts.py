"""``deepspeed.moe.utils`` for models without experts; libraries call it for every model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zero_runtime.deepspeed_names.tables.names import INSTEAD
from zero_runtime.errors import UnsupportedError


def has_moe_layers(m: torch.nn.Module) -> tuple[bool, int]:
    """(whether the model has experts, how many): always none, since ``deepspeed.moe.layer.MoE`` is not supported."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is an expert's, which DeepSpeed marks by ``allreduce``."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a param group is one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The unchanged param groups, in a list.

    Raises:
        UnsupportedError: a parameter is an expert's.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for number, group in enumerate(groups):
        if is_moe_param_group(group) or any(is_moe_param(each) for each in group["params"]):
            raise UnsupportedError(
                f"param group {number} has parameters of experts (MoE), which are not in this version; {INSTEAD}"
            )
        group["params"] = list(group["params"])
    return groups
