"""The gate functions of ``deepspeed.moe.sharded_moe``, for scripts that call these functions directly.

The gate functions return (load-balancing loss, weights, mask, number of tokens that chose each expert). The
weights and the mask have the shape tokens x experts x capacity. The mask is True where the weight is not 0.

With ``sparse_routes``, the functions return (loss, capacity, number of experts, experts, slots, weights, counts). The
experts, slots and weights have k x tokens elements each. The expert of a dropped token is -1.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from zero_runtime.comm import ProcessGroup, ReduceOp, get_world_size
from zero_runtime.errors import ConfigError
from zero_runtime.experts.gating import CapacityRule, Largest, Routes, top_1, top_2, top_k
from zero_runtime.experts.layer import filled, weighted


def top1gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: ProcessGroup | None = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> tuple[Any, ...]:
    """Send each token to one expert.

    The arguments are those of ``MoE``, and ``ep_group`` is the group of ranks that agree on a capacity.
    """
    rule = _rule(capacity_factor, min_capacity, drop_tokens, ep_group)
    noisy = noisy_gate_policy == "RSample"
    routes = top_1(logits, rule, used=used_token, noisy=noisy, random_selection=use_rts)
    return _answer(routes, logits.shape[1], sparse_routes)


def top2gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Send each token to two experts. The arguments have the same meaning as in :func:`top1gating`."""
    rule = _rule(capacity_factor, min_capacity, drop_tokens, ep_group)
    return _answer(
        top_2(logits, rule, samples_second=top2_2nd_expert_sampling), logits.shape[1], sparse_routes
    )


def topkgating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Send each token to ``k`` experts.

    The arguments that are not listed here have the same meaning as in :func:`top1gating`.

    Args:
        drop_policy: The tokens that an expert keeps: those with the largest gates (``probs``), or the first ones
            (``position``).

    Raises:
        ConfigError: ``drop_policy`` is unknown.
    """
    if drop_policy not in ("probs", "position"):
        raise ConfigError(f"drop_policy is {drop_policy!r}; expected probs or position")
    rule = _rule(capacity_factor, min_capacity, drop_tokens, ep_group)
    routes = top_k(logits, k, rule, keeps_first=drop_policy == "position")
    return _answer(routes, logits.shape[1], sparse_routes)


def communication() -> Any:
    """Return the module ``deepspeed.comm``. A script may have replaced functions in this module."""
    return import_module("deepspeed.comm")


def route_slots(
    indices: torch.Tensor, locations: torch.Tensor, num_experts: int, capacity: int
) -> torch.Tensor:
    """Return the slot of each choice among the slots of all experts, k x tokens.

    The slot of a dropped token is num_experts * capacity, which is one beyond the last slot.

    Args:
        indices: The chosen experts, k x tokens. The expert of a dropped token is -1.
        locations: The slots within the experts, k x tokens.
        num_experts: The number of experts of the layer.
        capacity: The number of slots of an expert.
    """
    slots = indices.long() * capacity + locations.long()
    return torch.where(indices >= 0, slots, num_experts * capacity)


def sparse_encode(
    reshaped_input: torch.Tensor, slots: torch.Tensor, num_experts: int, capacity: int
) -> torch.Tensor:
    """Return the slots of all experts, [experts, capacity, hidden].

    Each slot contains its token, or zeros if the slot is unused.
    """
    rows = filled(reshaped_input, slots, num_experts * capacity)
    return rows.view(num_experts, capacity, reshaped_input.shape[1])


def sparse_decode(
    expert_output: torch.Tensor, slots: torch.Tensor, gates: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Return the weighted sum of the outputs of the experts of each token, [tokens, hidden]."""
    return weighted(expert_output, slots.view(len(slots), num_tokens), gates)


def _rule(factor: float, minimum: int, drops: bool, group: ProcessGroup | None) -> CapacityRule:
    largest: Largest | None = None
    if group is not None and get_world_size(group) > 1:

        def largest(count: torch.Tensor) -> torch.Tensor:
            communication().all_reduce(count, op=ReduceOp.MAX, group=group)
            return count

    return CapacityRule(factor, minimum, drops, largest)


def _answer(routes: Routes, experts: int, sparse: bool) -> tuple[Any, ...]:
    if sparse:
        capacity = torch.tensor(routes.capacity)
        places = routes.experts.int(), routes.slots.int()
        return routes.loss, capacity, experts, *places, routes.weights, routes.counts
    weights = routes.weights.new_zeros(routes.experts.shape[1], experts, routes.capacity)
    for chosen, slots, gate in zip(routes.experts, routes.slots, routes.weights, strict=True):
        tokens = (chosen >= 0).nonzero().flatten()
        weights = weights.index_put((tokens, chosen[tokens], slots[tokens]), gate[tokens], accumulate=True)
    return routes.loss, weights, weights.bool(), routes.counts
