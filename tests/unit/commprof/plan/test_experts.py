"""Test ``commprof plan`` for models with experts against hand-computed sizes.

The model has two layers of width 64, so each layer has 12 x 64 x 64 parameters. The attention has 12,288 and
4,096 of them, and the feed-forward part has twice 16,384. An expert has the size of the feed-forward part. A
gate has 64 x 4.
"""

from __future__ import annotations

import json
import sys

import pytest

from commprof.cli import execute

CONFIG = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
SIZE = ("--model", "params:98304", "--layers", "2", "--world", "4", "--hosts", "2x2")
EXPERTS = ("--experts", "4", "--ep-size", "2", "--sequence", "32")
DENSE, EXPERT = 2 * (12_288 + 4_096 + 64 * 4), 32_768
SLOT = 4 * 64 * 2  # The bytes of one slot of all experts.
SOURCE = """
import copy
import torch
from torch import nn

class Layer(nn.Module):
    # as deepspeed.moe.layer.MoE: its parts, their names and marks
    def __init__(self, hidden, expert, num_experts, ep_size):
        super().__init__()
        inner = self.deepspeed_moe = nn.Module()
        inner.ep_size = ep_size
        inner.gate = nn.Module()
        inner.gate.wg = nn.Linear(hidden, num_experts, bias=False)
        inner.gate.k, inner.gate.capacity_factor, inner.gate.min_capacity, inner.gate.drop_tokens = 2, 1.5, 4, True
        inner.experts = nn.Module()
        inner.experts.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_experts // ep_size))
        for parameter in inner.experts.parameters():
            parameter.allreduce, parameter.group_name = False, f"ep_size_{ep_size}"

def model():
    return nn.Sequential(nn.Linear(8, 8), Layer(8, nn.Linear(8, 8), 4, 2), nn.Linear(8, 8))

def dense():
    return nn.Linear(8, 8)
"""


@pytest.fixture
def plan(tmp_path, capsys, monkeypatch):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    (tmp_path / "planned_experts.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "planned_experts", raising=False)

    def run(*words, code=0):
        assert execute(["plan", str(path), *words]) == code
        return capsys.readouterr()

    return run


def settings(plan, *words):
    return json.loads(plan(*words, "--json").out)["settings"]


def traffic(setting):
    """Return the messages and bytes of each group by purpose, operation and group size."""
    return {
        (row["purpose"], row["op"], row["group_size"]): (row["count"], row["payload_bytes"])
        for row in setting["traffic"]
    }


def test_gradients_go_by_group_and_tokens_by_the_capacity(plan):
    (found,) = settings(plan, *SIZE, *EXPERTS)
    sent = traffic(found)
    assert sent["gradient_reduce", "all_reduce", 4] == (1, DENSE * 2)
    assert sent["gradient_reduce", "all_reduce", 2] == (
        1,
        2 * 2 * EXPERT * 2,
    )  # Two layers with two experts per rank.
    assert sent["parameter_gather", "all_gather", 2] == (1, 2 * 2 * EXPERT * 2)
    # There are 8 slots = 32 tokens / 4 experts, and 4 all_to_alls in each of two layers.
    assert sent["activation", "all_to_all", 2] == (8, 8 * 8 * SLOT)
    (experts,) = found["experts"]
    assert (experts["layers"], experts["experts_per_rank"], experts["capacity"]) == (2, 2, 8)
    assert experts["parameter_bytes_per_rank"] == 2 * 2 * EXPERT * 2
    # Two ranks have the same experts and therefore shard their optimizer states.
    memory = found["expert_memory_bytes_per_rank"]
    assert (memory["parameters"], memory["masters"]) == (2 * 2 * EXPERT * 2, 2 * 2 * EXPERT // 2 * 4)


def test_an_uneven_load_drops_tokens_and_leaves_the_bytes(plan):
    (even,), (uneven,) = (settings(plan, *SIZE, *EXPERTS, "--expert-skew", skew) for skew in ("1", "2"))
    assert traffic(even) == traffic(uneven)
    assert (even["experts"][0]["dropped_share"], even["experts"][0]["busiest_rank"]) == (0, 1)
    experts = uneven["experts"][0]
    # The fullest expert gets 16 of 32 tokens and accepts 8. Each of the other three gets 16 / 3.
    assert experts["fullest_expert_tokens"] == 16 and experts["dropped_share"] == pytest.approx(8 / 32)
    assert experts["busiest_rank"] == pytest.approx(2 * (8 + 16 / 3) / 24)


def test_without_dropping_the_bytes_grow_with_the_fullest_expert(plan):
    words = (*SIZE, *EXPERTS, "--drop-tokens", "false", "--expert-skew", "1,2,4")
    found = settings(plan, *words)
    assert [each["set"] for each in found] == [{"experts.skew": skew} for skew in (1.0, 2.0, 4.0)]
    sizes = [traffic(each)["activation", "all_to_all", 2][1] for each in found]
    assert sizes == [8 * slots * SLOT for slots in (8, 16, 32)]
    assert all(each["experts"][0]["dropped_share"] == 0 for each in found)
    assert traffic(found[0])["activation", "all_reduce", 2] == (
        2,
        16,
    )  # The ranks agree on the slots of each layer.


def test_settings_of_experts_are_compared_and_those_that_do_not_fit_are_refused(plan):
    found = settings(plan, *SIZE, "--experts", "4", "--ep-size", "1,2,3,4", "--sequence", "32")
    assert ["refused" in each for each in found] == [False, False, True, False]
    held = [each["experts"][0]["parameter_bytes_per_rank"] for each in found if "refused" not in each]
    assert held == [2 * 4 * EXPERT * 2, 2 * 2 * EXPERT * 2, 2 * EXPERT * 2]
    assert ("activation", "all_to_all", 1) not in traffic(found[0])
    text = plan(*SIZE, "--experts", "4", "--ep-size", "2,4", "--sequence", "32").out
    assert "ep_size=4" in text and "by a host to others" in text


def test_the_table_says_what_stays_within_a_host(plan):
    text = plan(*SIZE, *EXPERTS, "--expert-skew", "2").out
    assert "2 layers have 4 experts each, ep_size 2" in text
    (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["activation"])
    assert row[-2:] == ["0", "B"]  # No bytes go to other hosts, because ep_size is 2 on hosts of 2 ranks.
    assert "25.0 % of the choices are dropped" in " ".join(text.split())


def test_experts_in_some_layers_and_without_the_number_of_tokens(plan):
    (found,) = settings(plan, *SIZE, "--experts", "4", "--ep-size", "2", "--expert-layers", "1")
    assert (found["experts"][0]["layers"], found["experts"][0]["capacity"]) == (1, None)
    assert not [key for key in traffic(found) if key[0] == "activation"]
    assert "give --sequence" in plan(*SIZE, "--experts", "4", "--json").err


def test_layers_of_a_model_that_is_built_are_found(plan):
    words = ("--model", "py:planned_experts:model", "--world", "4", "--sequence", "16")
    own, wider = settings(plan, *words)[0], settings(plan, *words, "--ep-size", "4", "--expert-k", "1")[0]
    expert = 8 * 8 + 8
    # k 2 x factor 1.5 x 16 tokens / 4 experts = 12 slots of 4 x 8 elements.
    assert traffic(own)["activation", "all_to_all", 2] == (4, 4 * 12 * 4 * 8 * 2)
    assert traffic(own)["gradient_reduce", "all_reduce", 2] == (1, 2 * expert * 2)
    assert traffic(wider)["activation", "all_to_all", 4] == (4, 4 * 6 * 4 * 8 * 2)
    assert traffic(wider)["gradient_reduce", "all_reduce", 1] == (1, expert * 2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((*SIZE, "--experts", "4", "--ep-size", "3"), "4 experts and ep_size 3"),
        ((*SIZE, "--experts", "6", "--ep-size", "3"), "ep_size is 3 on 4 ranks"),
        ((*SIZE, "--experts", "4", "--expert-skew", "5"), "expected 1 to 4"),
        ((*SIZE, "--experts", "4", "--expert-skew", "0.5"), "a number of 1 or more"),
        ((*SIZE, "--experts", "four"), "--experts is 'four'"),
        ((*SIZE, "--experts", "4", "--expert-layers", "3"), "the model has 2 layers"),
        ((*SIZE, "--ep-size", "2"), "give --experts"),
        ((*SIZE, "--experts", "4", "--set", "zero_optimization.stage=3"), "zero_optimization.stage is 3"),
        ((*SIZE, "--experts", "4", "--set", "tp_size=2"), "experts have rules with data parallelism alone"),
        (("--model", "py:planned_experts:model", "--experts", "8"), "--experts is for --model params:N"),
        (("--model", "py:planned_experts:dense", "--ep-size", "2"), "the model has no layers of experts"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(plan, words, text):
    said = plan(*words, code=2).err
    assert text in " ".join(said.split()) and said.count("\n") <= 3


def activations(plan, *more):
    (setting,) = json.loads(plan(*SIZE, *more, "--json").out)["settings"]
    return setting["memory_bytes_per_rank"]["parts"]["activations"]["device"]


def test_activations_grow_with_the_slots_and_not_with_the_ranks_that_share_experts(plan):
    once = activations(plan, *EXPERTS)
    assert activations(plan, *EXPERTS, "--ep-size", "1") == once
    twice, four = (activations(plan, *EXPERTS, "--capacity-factor", factor) for factor in ("2", "4"))
    assert once < twice and four - twice == 2 * (twice - once)
