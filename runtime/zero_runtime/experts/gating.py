"""The choice of experts for tokens, by top-1, top-2 and top-k gates with a capacity.

Each function takes the logits of ``tokens`` tokens for ``experts`` experts in fp32, and returns
:class:`Routes`. The rules are those of GShard (arXiv:2006.16668) and Switch Transformers (arXiv:2101.03961).
The order of random numbers and of floating-point operations is that of DeepSpeed 0.19.8, so that losses are
equal.

The capacity is the number of slots of an expert for the tokens of one rank::

    capacity = max(ceil(tokens / experts x factor x k), min_capacity)

A token that exceeds the capacity of its expert is dropped, and its output is zero. Without dropping, the
capacity is the largest number of tokens that an expert gets from any rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributions import Gumbel, Uniform

from zero_runtime.errors import UsageError

JITTER = 0.01
# A function that returns the largest value of a count over the ranks that exchange tokens.
Largest = Callable[[torch.Tensor], torch.Tensor]


class CapacityRule(NamedTuple):
    """The rule by which the capacity is computed.

    Attributes:
        factor: The factor of the mean number of tokens of an expert, without k.
        minimum: The smallest capacity.
        drops: Whether tokens that exceed the capacity are dropped. Otherwise the capacity is as large as
            needed.
        largest: A function that returns the largest count of all ranks, or None for a single rank.
    """

    factor: float
    minimum: int
    drops: bool = True
    largest: Largest | None = None

    def slots(self, tokens: int, experts: int, k: int) -> int:
        """Return the number of slots of each expert if tokens are dropped, computed in fp32 as in DeepSpeed."""
        return max(int(torch.ceil((tokens / experts) * torch.tensor(self.factor * k))), self.minimum)

    def needed(self, counts: torch.Tensor) -> int:
        """Return the number of slots of each expert if no token is dropped."""
        count = counts.max()
        return int(count if self.largest is None else self.largest(count))


class Routes(NamedTuple):
    """The experts and slots to which each token is sent. k is the number of experts per token.

    Attributes:
        loss: The load-balancing loss (0-D). A smaller loss means a more even load.
        capacity: The number of slots of each expert.
        experts: The chosen experts (k x tokens, int64), with -1 for a dropped token.
        slots: The slots within the experts (k x tokens, int64). The slot of a dropped token is undefined.
        weights: The factors of the experts' outputs (k x tokens, fp32), with 0 for a dropped token.
        counts: The number of tokens that chose each expert, before any token is dropped (int64).
    """

    loss: torch.Tensor
    capacity: int
    experts: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor


def jittered(values: torch.Tensor) -> torch.Tensor:
    """Return ``values``, each multiplied by a random number between 0.99 and 1.01."""
    ends = (
        torch.tensor(1.0 - JITTER, device=values.device),
        torch.tensor(1.0 + JITTER, device=values.device),
    )
    return values * Uniform(*ends).rsample(values.shape)


def _gumbel(like: torch.Tensor) -> torch.Tensor:
    ends = torch.tensor(0.0, device=like.device), torch.tensor(1.0, device=like.device)
    return Gumbel(*ends).rsample(like.shape)


def top_1(
    logits: torch.Tensor,
    rule: CapacityRule,
    *,
    used: torch.Tensor | None = None,
    noisy: bool = False,
    random_selection: bool = True,
) -> Routes:
    """Send each token to the expert with the largest gate.

    Args:
        logits: The logits, tokens x experts.
        rule: The rule of the capacity.
        used: A mask of the tokens that are routed, or None to route all tokens.
        noisy: Whether to add Gumbel noise to the logits for the choice.
        random_selection: Whether the dropped tokens are chosen randomly. Otherwise torch.topk's order of
            equal values decides, as in DeepSpeed.

    Raises:
        UsageError: There are fewer tokens than the smallest capacity.
    """
    tokens, experts = logits.shape
    if tokens < rule.minimum:
        raise UsageError(
            f"an MoE layer got {tokens} tokens, fewer than its min_capacity {rule.minimum}; use larger batches, or "
            "a smaller min_capacity (0 disables it)"
        )
    choice = logits + _gumbel(logits) if noisy else None
    gates = torch.softmax(logits, dim=1)
    chosen = torch.argmax(gates if choice is None else choice, dim=1)
    mask = _one_hot(chosen, experts)
    if used is not None:
        mask = used.unsqueeze(1) * mask
    counts = mask.sum(dim=0).detach()
    capacity = rule.slots(tokens, experts, 1) if rule.drops else min(rule.needed(counts), tokens)
    loss = torch.sum(gates.mean(dim=0) * mask.float().mean(dim=0)) * experts
    order = mask
    if random_selection:
        zero, one = torch.tensor(0.0, device=logits.device), torch.tensor(1.0, device=logits.device)
        order = mask * Uniform(zero, one).rsample(mask.shape)
    first = torch.topk(order, k=min(capacity, tokens), dim=0).indices
    mask = mask * torch.zeros_like(mask).scatter_(0, first, 1)
    has_slot = mask.sum(dim=1) > 0
    slots = ((torch.cumsum(mask, dim=0) - 1) * mask).sum(dim=1)
    weights = (gates * mask).sum(dim=1)
    routed = torch.where(has_slot, chosen, torch.full_like(chosen, -1))
    return Routes(
        loss, capacity, routed.unsqueeze(0), slots.long().unsqueeze(0), weights.unsqueeze(0), counts
    )


def top_2(logits: torch.Tensor, rule: CapacityRule, *, samples_second: bool = True) -> Routes:
    """Send each token to the two experts with the largest gates.

    First choices get their slots before second choices.

    Args:
        logits: The logits, tokens x experts.
        rule: The rule of the capacity.
        samples_second: Whether to sample the second expert with the Gumbel-max trick.
    """
    tokens, experts = logits.shape
    gates = torch.softmax(logits, dim=1)
    first = torch.argmax(gates, dim=1)
    mask_1 = _one_hot(first, experts)
    # The noise is added in the dtype of the logits, as in DeepSpeed. With torch.autocast it is a 16-bit dtype.
    noisy = (logits + _gumbel(logits)).to(logits.dtype) if samples_second else logits
    second = torch.argmax(noisy.masked_fill(mask_1.bool(), float("-inf")), dim=1)
    mask_2 = _one_hot(second, experts)
    slots_1 = torch.cumsum(mask_1, dim=0) - 1
    slots_2 = torch.cumsum(mask_2, dim=0) - 1 + mask_1.sum(dim=0, keepdim=True)
    loss = torch.mean(gates.mean(dim=0) * mask_1.float().mean(dim=0)) * experts * experts
    counts = (mask_1 + mask_2).sum(dim=0).detach()
    if rule.drops:
        capacity = rule.slots(tokens, experts, 2)
        mask_1 = mask_1 * (slots_1 < capacity)
        mask_2 = mask_2 * (slots_2 < capacity)
    else:
        capacity = rule.needed(counts)
    # As in DeepSpeed this is a matrix product, whose dtype torch.autocast determines. Without autocast the
    # product is exact.
    weights_1, weights_2 = (torch.einsum("se,se->s", gates, mask.float()) for mask in (mask_1, mask_2))
    total = weights_1 + weights_2
    total = torch.clamp(total, min=torch.finfo(total.dtype).eps)
    dropped = torch.full_like(first, -1)
    return Routes(
        loss,
        capacity,
        torch.stack(
            [
                torch.where(mask_1.any(dim=1), first, dropped),
                torch.where(mask_2.any(dim=1), second, dropped),
            ]
        ),
        torch.stack([(slots_1 * mask_1).sum(dim=1), (slots_2 * mask_2).sum(dim=1)]),
        torch.stack([weights_1 / total, weights_2 / total]),
        counts,
    )


def top_k(logits: torch.Tensor, k: int, rule: CapacityRule, *, keeps_first: bool = False) -> Routes:
    """Send each token to the ``k`` experts with the largest gates.

    If tokens exceed the capacity of an expert, the expert keeps the tokens with the largest gates.

    Args:
        logits: The logits, tokens x experts.
        k: The number of experts of each token.
        rule: The rule of the capacity.
        keeps_first: Whether an expert keeps the first tokens instead.
    """
    tokens, experts = logits.shape
    gates = torch.softmax(logits, dim=1)
    top, chosen = torch.topk(gates, k=k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, chosen, True)
    counts = mask.sum(dim=0).detach()
    loss = torch.mean(gates.mean(dim=0) * mask.float().mean(dim=0)) * experts * experts / k
    if rule.drops and keeps_first:
        capacity = rule.slots(tokens, experts, k)
        mask &= torch.cumsum(mask, dim=0) <= capacity
    elif rule.drops:
        capacity = rule.slots(tokens, experts, k)
        only_top = torch.zeros_like(gates).scatter(1, chosen, top)
        kept_tokens = torch.topk(only_top, k=min(capacity, tokens), dim=0, sorted=False).indices
        mask &= torch.zeros_like(mask).scatter_(0, kept_tokens, True)
    else:
        capacity = rule.needed(counts)
    slots = torch.cumsum(mask, dim=0) - 1
    masked = gates * mask
    weights = masked / torch.clamp(masked.sum(dim=-1, keepdim=True), min=torch.finfo(gates.dtype).eps)
    keeps = mask.gather(1, chosen)
    return Routes(
        loss,
        capacity,
        torch.where(keeps, chosen, torch.full_like(chosen, -1)).t().contiguous(),
        (slots.gather(1, chosen) * keeps).t().contiguous(),
        weights.gather(1, chosen).t().contiguous(),
        counts,
    )


def _one_hot(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(chosen, num_classes=experts)
