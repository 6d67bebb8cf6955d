"""Test the groups of ranks that share experts, and the names and param groups of expert parameters."""

from __future__ import annotations

import pytest
import torch

from zero_runtime.errors import ConfigError, UnsupportedError, UsageError
from zero_runtime.experts.expert_groups import rank_sets
from zero_runtime.experts.expert_parameters import (
    all_names,
    check_groups,
    ep_size,
    is_expert,
    parameter_names,
    with_expert_groups,
)
from zero_runtime.experts.layer import MoE


@pytest.mark.parametrize("data_first", [False, True])
@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (4, 1), (4, 2), (4, 4), (16, 4), (12, 3)])
def test_each_pair_of_groups_shares_one_rank(ranks, size, data_first):
    sets = rank_sets(ranks, size, data_first)
    for kind, width in ((sets.parallel, size), (sets.data, ranks // size)):
        assert sorted(rank for group in kind for rank in group) == list(range(ranks))
        assert {len(group) for group in kind} == {width}
    for parallel in sets.parallel:
        assert all(len(set(parallel) & set(data)) == 1 for data in sets.data)
    adjacent = sets.data if data_first else sets.parallel
    assert all(group == tuple(range(group[0], group[0] + len(group))) for group in adjacent)


def test_a_size_that_does_not_divide_the_ranks_is_refused():
    with pytest.raises(
        ConfigError, match="ep_size is 3, and there are 4 data-parallel ranks; expected a divisor of 4"
    ):
        rank_sets(4, 3)


def small_model(size=1):
    layer = MoE(4, torch.nn.Linear(4, 4), num_experts=4, ep_size=size)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), layer)


def test_experts_are_numbered_within_their_layer():
    model = small_model(2)
    experts = model[1].deepspeed_moe.experts
    experts.first, experts.total = 2, 4  # This is the state on the second of two ranks.
    prefix = "1.deepspeed_moe.experts.deepspeed_experts"
    own = {f"{prefix}.{number}.{name}" for number in (2, 3) for name in ("weight", "bias")}
    named = parameter_names(model)
    assert {name for parameter, name in named.items() if is_expert(parameter)} == own
    everywhere = all_names(model)
    assert {name for name in everywhere if prefix in name} == {
        f"{prefix}.{number}.{name}" for number in range(4) for name in ("weight", "bias")
    }
    assert everywhere[f"{prefix}.1.weight"] is everywhere[f"{prefix}.3.weight"]
    assert {ep_size(parameter) for parameter in named} == {None, 2}


def test_experts_get_param_groups_of_their_own():
    model = small_model(2)
    groups = with_expert_groups(list(model.parameters()))
    assert [(group["name"], group.get("moe", False), len(group["params"])) for group in groups] == [
        ("dense-params", False, 3),
        ("ep_size_2", True, 4),
    ]
    check_groups(groups, parameter_names(model))
    again = with_expert_groups(groups)
    assert again == groups


def test_groups_of_experts_are_divided_at_the_limit_and_keep_their_options():
    model = small_model()
    given = [{"params": list(model.parameters()), "weight_decay": 0.1, "name": "all"}]
    dense, *experts = with_expert_groups(given, 25)
    assert dense["weight_decay"] == 0.1 and len(experts) == 4
    assert all(sum(each.numel() for each in group["params"]) == 20 for group in experts)
    assert all(group["weight_decay"] == 0.1 and group["name"] == "ep_size_1" for group in experts)


def test_experts_among_other_parameters_are_refused_by_name():
    model = small_model(2)
    with pytest.raises(
        ConfigError, match=r"experts\.0\.weight is in param group 0, which is not for experts; expected one"
    ):
        check_groups([{"params": list(model.parameters())}], parameter_names(model))
    with pytest.raises(
        ConfigError, match=r"0\.weight is in param group 0, which is for the experts of ep_size_2"
    ):
        check_groups(
            [{"params": list(model.parameters()), "moe": True, "name": "ep_size_2"}], parameter_names(model)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 3, "ep_size": 2}, "num_experts 3 and ep_size 2"),
        ({"num_experts": 2, "k": 3}, "k 3 and num_experts 2"),
        ({"noisy_gate_policy": "Loud"}, "noisy_gate_policy is 'Loud'; expected Jitter, RSample or None"),
    ],
)
def test_wrong_arguments_are_refused_with_their_values(arguments, message):
    with pytest.raises(ConfigError, match=message):
        MoE(4, torch.nn.Linear(4, 4), **arguments)


def test_tensor_parallel_experts_are_refused():
    with pytest.raises(UnsupportedError, match="enable_expert_tensor_parallelism"):
        MoE(4, torch.nn.Linear(4, 4), enable_expert_tensor_parallelism=True)


def test_a_layer_on_several_ranks_needs_initialize():
    with pytest.raises(UsageError, match="ep_size 2 runs before its model was passed to initialize"):
        small_model(2)(torch.randn(8, 4))


def test_a_layer_on_one_rank_is_the_weighted_sum_of_its_experts():
    torch.manual_seed(0)
    layer = MoE(
        4, torch.nn.Linear(4, 4), num_experts=2, k=2, capacity_factor=4.0, top2_2nd_expert_sampling=False
    )
    tokens = torch.randn(3, 5, 4, requires_grad=True)
    output, loss, counts = layer(tokens)
    gates = torch.softmax(tokens @ layer.deepspeed_moe.gate.wg.weight.t(), dim=-1)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    expected = sum(gates[..., number : number + 1] * expert(tokens) for number, expert in enumerate(experts))
    torch.testing.assert_close(output, expected)
    assert counts.tolist() == [15, 15] and loss.shape == ()
    output.sum().backward()
    mine = tokens.grad.clone()
    tokens.grad = None
    expected.sum().backward()
    torch.testing.assert_close(mine, tokens.grad)
