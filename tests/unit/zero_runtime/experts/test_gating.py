"""Test gates against the rules of GShard and Switch Transformers, counted token by token in plain Python."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from commprof import hooks
from zero_runtime.deepspeed_names.training import gates
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.experts.gating import CapacityRule, jittered, top_1, top_2, top_k
from zero_runtime.experts.layer import MoE

TOKENS, EXPERTS = 24, 4


def some_logits(seed=0, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, EXPERTS, generator=generator) * 2


def probabilities(logits):
    return [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in logits.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_a_mask_of_used_tokens_of_any_type_gives_whole_numbers_to_the_records(monkeypatch, dtype):
    loads = []
    monkeypatch.setattr(hooks, "recording", lambda: True)
    monkeypatch.setattr(hooks, "expert_load", lambda *values: loads.append(values))
    used = torch.arange(TOKENS) % 3 > 0
    MoE(8, torch.nn.Linear(8, 8), EXPERTS)(torch.randn(TOKENS, 8), used.to(dtype))
    ((_, counts, _, tokens),) = loads
    assert counts.dtype is torch.int64 and int(counts.sum()) == int(used.sum()) and tokens == TOKENS


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_top_1_sends_each_token_to_its_best_expert_until_that_is_full(factor):
    logits = some_logits()
    routes = top_1(logits, CapacityRule(factor, 1), random_selection=False)
    capacity = math.ceil(TOKENS / EXPERTS * factor)
    gates = probabilities(logits)
    choice = [max(range(EXPERTS), key=row.__getitem__) for row in gates]
    for expert in range(EXPERTS):
        choosers = [token for token, best in enumerate(choice) if best == expert]
        kept = [token for token in choosers if routes.experts[0, token] == expert]
        assert len(kept) == min(len(choosers), capacity)
        # torch.topk decides which tokens are kept, as in DeepSpeed. The kept tokens get slots in their order.
        assert [int(routes.slots[0, token]) for token in kept] == list(range(len(kept)))
        assert [routes.weights[0, token].item() for token in kept] == pytest.approx(
            [gates[token][expert] for token in kept]
        )
        dropped = set(choosers) - set(kept)
        assert all(routes.experts[0, token] == -1 and routes.weights[0, token] == 0 for token in dropped)
    assert routes.capacity == capacity
    chosen = Counter(choice)
    assert routes.counts.tolist() == [chosen[expert] for expert in range(EXPERTS)]
    means = [sum(row[expert] for row in gates) / TOKENS for expert in range(EXPERTS)]
    loss = EXPERTS * sum(mean * chosen[expert] / TOKENS for expert, mean in enumerate(means))
    assert routes.loss.item() == pytest.approx(loss)


def test_random_selection_drops_as_many_but_others():
    logits = some_logits()
    torch.manual_seed(1)
    first = top_1(logits, CapacityRule(0.5, 1))
    torch.manual_seed(2)
    second = top_1(logits, CapacityRule(0.5, 1))
    assert torch.equal(first.counts, second.counts)
    assert (first.experts < 0).sum() == (second.experts < 0).sum() > 0
    assert not torch.equal(first.experts, second.experts)


@pytest.mark.parametrize("gate", [top_1, top_2, lambda logits, rule: top_k(logits, 3, rule)])
def test_no_two_tokens_share_a_slot_and_no_slot_is_beyond_the_capacity(gate):
    for seed in range(5):
        routes = gate(some_logits(seed), CapacityRule(0.5, 1))
        kept = routes.experts >= 0
        places = [
            tuple(pair)
            for pair in zip(routes.experts[kept].tolist(), routes.slots[kept].tolist(), strict=True)
        ]
        assert len(set(places)) == len(places)
        assert all(0 <= slot < routes.capacity for _, slot in places)


def test_top_2_serves_first_choices_before_second_ones_and_normalizes_the_weights():
    logits = some_logits()
    routes = top_2(logits, CapacityRule(0.75, 1), samples_second=False)
    gates = probabilities(logits)
    capacity = math.ceil(TOKENS / EXPERTS * 0.75 * 2)
    ranked = [sorted(range(EXPERTS), key=lambda expert: -row[expert])[:2] for row in gates]
    filled = Counter()
    kept = {}
    for choice in range(2):
        for token in range(TOKENS):
            expert = ranked[token][choice]
            if filled[expert] < capacity:
                kept[choice, token] = filled[expert]
            # Second choices get slots after all first choices, whether the first choices are kept or not.
            filled[expert] += 1
    for token, row in enumerate(gates):
        total = sum(row[ranked[token][choice]] for choice in range(2) if (choice, token) in kept)
        for choice in range(2):
            expert = ranked[token][choice]
            if (choice, token) in kept:
                assert routes.experts[choice, token] == expert
                assert routes.slots[choice, token] == kept[choice, token]
                assert routes.weights[choice, token].item() == pytest.approx(row[expert] / total, rel=1e-5)
            else:
                assert routes.experts[choice, token] == -1


def test_top_k_keeps_the_tokens_with_the_largest_gates():
    logits = some_logits()
    routes = top_k(logits, 3, CapacityRule(0.5, 1))
    gates = probabilities(logits)
    capacity = math.ceil(TOKENS / EXPERTS * 0.5 * 3)
    for expert in range(EXPERTS):
        choosers = [
            token
            for token, row in enumerate(gates)
            if expert in sorted(range(EXPERTS), key=lambda each: -row[each])[:3]
        ]
        best = sorted(choosers, key=lambda token: -gates[token][expert])[:capacity]
        kept = (routes.experts == expert).any(dim=0).nonzero().flatten().tolist()
        assert sorted(best) == kept


def test_without_dropping_the_capacity_is_the_largest_load_of_all_ranks():
    logits = some_logits()
    asked = []

    def largest(count):
        asked.append(int(count))
        return torch.tensor(17)

    for gate in (top_1, top_2, lambda logits, rule: top_k(logits, 3, rule)):
        routes = gate(logits, CapacityRule(1.0, 4, drops=False, largest=largest))
        assert routes.capacity == 17 and (routes.experts >= 0).all()
        assert asked.pop() == int(routes.counts.max())
        alone = gate(logits, CapacityRule(1.0, 4, drops=False))
        assert alone.capacity == int(alone.counts.max())


def test_unused_tokens_are_not_routed():
    used = torch.ones(TOKENS, dtype=torch.int64)
    used[::2] = 0
    routes = top_1(some_logits(), CapacityRule(4.0, 1), used=used)
    assert ((routes.experts[0] >= 0) == (used == 1)).all()
    assert routes.counts.sum() == TOKENS // 2


def test_the_gradient_reaches_the_logits_through_weights_and_loss():
    for gate in (top_1, top_2, lambda logits, rule: top_k(logits, 3, rule)):
        logits = some_logits().requires_grad_()
        routes = gate(logits, CapacityRule(1.0, 4))
        (routes.weights.sum() + routes.loss).backward()
        assert logits.grad is not None and logits.grad.abs().sum() > 0


def test_too_few_tokens_are_refused_with_the_numbers():
    with pytest.raises(UsageError, match="got 3 tokens, fewer than its min_capacity 4"):
        top_1(some_logits(tokens=3), CapacityRule(1.0, 4))


def test_jitter_is_one_percent():
    factors = jittered(torch.ones(1000))
    assert 0.99 <= factors.min() < 0.992 and 1.008 < factors.max() <= 1.01


def test_top_k_can_keep_the_first_tokens():
    routes = top_k(some_logits(), 3, CapacityRule(0.5, 1), keeps_first=True)
    everything = top_k(some_logits(), 3, CapacityRule(8.0, 1))
    for expert in range(EXPERTS):
        choosers = (everything.experts == expert).any(dim=0).nonzero().flatten().tolist()
        kept = (routes.experts == expert).any(dim=0).nonzero().flatten().tolist()
        assert kept == choosers[: routes.capacity]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_functions_of_deepspeed_return_the_same_routes_as_masks(k):
    def gate(**options):
        if k == 1:
            return gates.top1gating(some_logits(), 0.5, 1, use_rts=False, **options)
        if k == 2:
            return gates.top2gating(some_logits(), 0.5, 1, top2_2nd_expert_sampling=False, **options)
        return gates.topkgating(some_logits(), 3, 0.5, 1, **options)

    loss, weights, mask, counts = gate()
    _, capacity, experts, chosen, slots, factors, _ = gate(sparse_routes=True)
    assert weights.shape == mask.shape == (TOKENS, experts, int(capacity)) and loss.shape == ()
    assert mask.sum() == (chosen >= 0).sum() and counts.sum() == k * TOKENS
    for choice in range(k):
        for token in range(TOKENS):
            if chosen[choice, token] >= 0:
                assert weights[token, chosen[choice, token], slots[choice, token]] == factors[choice, token]
    with pytest.raises(ConfigError, match="drop_policy is 'last'; expected probs or position"):
        gates.topkgating(some_logits(), 3, 0.5, 1, drop_policy="last")


@pytest.mark.parametrize("k", [1, 2])
def test_sparse_routes_give_what_the_masks_give(k):
    tokens, experts = torch.randn(12, 5), 4
    logits = torch.randn(12, experts)
    gate = gates.top1gating if k == 1 else gates.top2gating
    options = {"use_rts": False} if k == 1 else {"top2_2nd_expert_sampling": False}
    _, weights, mask, _ = gate(logits, 0.75, 0, **options)
    _, capacity, _, indices, locations, chosen, _ = gate(logits, 0.75, 0, sparse_routes=True, **options)
    slots = gates.route_slots(indices, locations, experts, int(capacity))
    rows = gates.sparse_encode(tokens, slots, experts, int(capacity))
    assert torch.allclose(rows, torch.einsum("sec,sm->ecm", mask.float(), tokens))
    outputs = torch.randn_like(rows)
    combined = gates.sparse_decode(outputs.view(-1, 5), slots, chosen, 12)
    assert torch.allclose(combined, torch.einsum("sec,ecm->sm", weights, outputs), atol=1e-6)
