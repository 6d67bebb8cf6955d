"""The messages that the rules expect of models with experts, compared with recorded DeepSpeed runs of the repository.

``tests/golden/deepspeed_experts`` has the messages of each rank, counted at torch's ProcessGroup objects. The
models are those of ``support/expert_cases.py``. Their layer of experts has the names and sizes of DeepSpeed's
layer, and does nothing.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from commprof.requested import Parameter, UnsupportedError, expected, micro_steps
from commprof.requested.experts.layers import ExpertLayer, token_messages
from commprof.requested.experts.rank_groups import RankGroups
from commprof.requested.parameters import item_bytes
from commprof.schema import format_ranks
from support import expert_cases
from support.expert_cases import CONTEXT, MICRO_BATCHES

GOLDEN = Path(__file__).parents[2] / "golden" / "deepspeed_experts"
RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json"))}
# Properties of a model that neither its config nor its layers state. With torch.autocast this is the element
# type of tokens.
UNSTATED = {"recomputed", "frozen_experts", "torch_autocast"}
TRAINED = [
    name
    for name, recorded in RECORDED.items()
    if "error" not in recorded["ranks"][0]
    and not UNSTATED & (recorded["case"].keys() | recorded["case"]["config"].keys())
]
OPS = {
    "allreduce": "all_reduce",
    "all_gather_single": "all_gather",
    "all_to_all_single": "all_to_all",
}
# Cases that are refused because of a key. DeepSpeed refuses other cases for reasons that the messages do not
# show.
REFUSED = {
    "gpt_s3_ep2_w2": "zero_optimization.stage",
    "gpt_s1_ep2_w2_all_reduce": "zero_optimization.reduce_scatter",
    "gpt_s2_ep2_w2_all_reduce": "zero_optimization.reduce_scatter",
    "gpt_s2_ep2_w2_not_contiguous": "zero_optimization.contiguous_gradients",
}


class Layer(nn.Module):
    """A layer of experts with the names and sizes of DeepSpeed's layer."""

    def __init__(self, hidden_size, expert, num_experts=1, ep_size=1, use_residual=False, **rest) -> None:
        super().__init__()
        copies = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_experts // ep_size))
        for parameter in copies.parameters():
            parameter.ep_size = ep_size
        layer = nn.Module()
        layer.gate = nn.Module()
        layer.gate.wg = nn.Linear(hidden_size, num_experts, bias=False)
        layer.experts = nn.Module()
        layer.experts.deepspeed_experts = copies
        self.deepspeed_moe = layer
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)
        k, factor = rest.get("k", 1), rest.get("capacity_factor", 1.0)
        self.settings = (k, factor, rest.get("min_capacity", 4), rest.get("drop_tokens", True), hidden_size)
        self.sizes = (num_experts, ep_size)


def model_of(case: dict[str, Any]) -> tuple[list[Parameter], list[ExpertLayer]]:
    """Return the parameters of a rank, with the groups of experts last, and the layers of experts."""
    model = expert_cases.MODELS[case["model"]](Layer, case)
    named = [
        (name, parameter, getattr(parameter, "ep_size", None)) for name, parameter in model.named_parameters()
    ]
    decays = case.get("groups") == "decay"
    kinds = sorted(
        {(size is not None, decays and parameter.dim() <= 1, size or 0) for _, parameter, size in named}
    )
    parameters = [
        Parameter(
            name,
            parameter.numel(),
            param_group=kinds.index((size is not None, decays and parameter.dim() <= 1, size or 0)),
            forward_index=index,
            ep_size=size,
        )
        for index, (name, parameter, size) in enumerate(named)
    ]
    tokens = MICRO_BATCHES[case["model"]] * (CONTEXT if case["model"] == "gpt" else 1)
    layers = [
        ExpertLayer(name, *each.sizes, *each.settings, tokens)
        for name, each in model.named_modules()
        if isinstance(each, Layer)
    ]
    return parameters, layers


def in_group_order(parameters: list[Parameter]) -> list[Parameter]:
    return sorted(parameters, key=lambda each: each.param_group)


def counted(rows, world: int) -> dict[int, Counter[Any]]:
    """Return the messages and bytes of each rank by (operation, group)."""
    sums: dict[int, Counter[Any]] = {rank: Counter() for rank in range(world)}
    for row in rows:
        for group in row.groups or (tuple(range(world)),):
            key = row.issued_op, format_ranks(list(group))
            for rank in group:
                sums[rank][*key, "bytes"] += row.payload_bytes
                sums[rank][*key, "messages"] += row.count
    return sums


def recorded_sums(messages: list[str]) -> Counter[Any]:
    sums: Counter[Any] = Counter()
    for text in messages:
        _, method, group, numel, dtype, *_ = text.split()
        ranks = format_ranks([int(rank) for rank in group.split("-")])
        key = OPS.get(method, method), ranks
        sums[*key, "bytes"] += int(numel.rpartition(">")[2]) * item_bytes(dtype)
        sums[*key, "messages"] += 1
    return sums


def messages_of(recorded: dict[str, Any], rank: int) -> list[list[str]]:
    """Return the messages of initialization, of each step, and of an evaluation."""
    sequences: list[list[str]] = []
    for numbers in recorded["messages_of_ranks"][rank]:
        same = numbers is None
        sequences.append(sequences[-1] if same else [recorded["messages"][number] for number in numbers])
    return sequences


def of_known_capacity(
    layers: list[ExpertLayer], recorded: dict[str, Any], pass_number: int, world: int, item: int
) -> list[Any]:
    """Return the messages that layers without token dropping send in one forward pass.

    The sizes follow from the counts of the gates.
    """
    rows = []
    for number, layer in enumerate(layers):
        for group in RankGroups(world).of_experts(layer.ep_size):
            counts = [recorded["ranks"][rank]["expert_counts"][pass_number][number] for rank in group]
            slots = max(max(each) for each in counts)
            rows += token_messages(layer, (group,), item, 2, slots)
    return rows


@pytest.mark.parametrize("name", TRAINED)
def test_the_rules_give_the_recorded_messages(name):
    recorded = RECORDED[name]
    case = recorded["case"]
    config, world = case["config"], case["world"]
    parameters, layers = model_of(case)
    # All these models produce gradients in this order.
    backward = [each.name for each in parameters[::-1]]
    rows = expected(
        config, in_group_order(parameters), world, backward, runtime="deepspeed", expert_layers=layers
    )
    passes = micro_steps(config, world)
    item = 2 if {"bf16", "fp16"} & config.keys() else 4
    for rank in range(world):
        sequences = messages_of(recorded, rank)
        start = recorded_sums(sequences[0])
        assert start == counted([row for row in rows if row.when == "init"], world)[rank]
        for step, messages in enumerate(sequences[1:-1]):
            of_step = [row for row in rows if row.when == "step"]
            if not any("gather" in text for text in messages) and any(
                "gather" in row.issued_op for row in rows
            ):
                of_step = [row for row in of_step if row.purpose == "overflow_check"]  # a skipped step
            each_pass = [row for row in rows if row.when == "micro_step"]
            if not all(layer.drop_tokens for layer in layers):
                each_pass = [row for row in each_pass if row.purpose != "activation"]
                of_step += of_known_capacity(layers, recorded, step, world, item)
            assert recorded_sums(messages) == counted(of_step + passes * each_pass, world)[rank]


@pytest.mark.parametrize("name", REFUSED)
def test_what_deepspeed_refuses_is_refused(name):
    case = RECORDED[name]["case"]
    parameters, layers = model_of(case)
    with pytest.raises(UnsupportedError) as refusal:
        expected(case["config"], in_group_order(parameters), case["world"], expert_layers=layers)
    assert refusal.value.key == REFUSED[name]
