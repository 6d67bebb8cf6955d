"""Layers of experts that a program publishes: each forward pass with its step, and what of it was dropped."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from commprof import hooks
from support.recording import record

pytestmark = pytest.mark.ranks

LAYER = {
    "layer": "blocks.0.moe",
    "num_experts": 4,
    "ep_size": 2,
    "k": 1,
    "capacity_factor": 1.25,
    "eval_capacity_factor": 2.0,
    "min_capacity": 4,
    "drop_tokens": True,
    "hidden": 16,
    "expert_ranks": "0,1",
}
COUNTS = [7, 0, 2, 3]


def publish(rank, world):
    hooks.describe_expert_layers([LAYER])
    hooks.describe_parameters(
        [
            {
                "name": name,
                "shape": "4",
                "dtype": "float32",
                "numel": 4,
                "requires_grad": True,
                "ep_size": size,
            }
            for name, size in (("wg", None), ("experts.2.w", 2))
        ]
    )
    gone = []
    for step in range(2):
        for micro_step in range(2):
            hooks.step(step, micro_step)
            hooks.phase("forward")
            for _ in range(2 if step else 1):
                counts = torch.tensor(COUNTS) + rank
                gone.append(weakref.ref(counts))
                hooks.expert_load("blocks.0.moe", counts, 5, 12)
                del counts
            dist.all_reduce(torch.ones(2))
            hooks.phase("backward")
        hooks.phase("optimizer")
        hooks.end_step()
        hooks.phase("evaluation")
        hooks.expert_load("blocks.0.moe", torch.tensor(COUNTS), 50, 12)
        hooks.phase("other")
    gc.collect()
    return [each() is None for each in gone]


def test_each_forward_pass_gives_one_row_an_expert(tmp_path):
    run, outcomes = record(tmp_path / "run", 2, publish)
    assert run.health.notes == () and run.health.state == "complete"
    assert all(all(outcome["result"]) for outcome in outcomes)  # no tensor was kept
    layers = run.table("expert_layers").to_pylist()
    assert [row["rank"] for row in layers] == [0, 1]
    assert [{name: row[name] for name in LAYER} for row in layers] == [LAYER, LAYER]
    sizes = {row["name"]: row["ep_size"] for row in run.table("parameters").to_pylist()}
    assert sizes == {"wg": None, "experts.2.w": 2}

    rows = [row for row in run.table("expert_loads").to_pylist() if row["rank"] == 1]
    columns = (
        "step",
        "after_step",
        "micro_step",
        "phase",
        "call",
        "expert",
        "tokens",
        "dropped",
        "capacity",
        "sent",
    )
    said = [tuple(row[name] for name in columns) for row in rows]

    def forward(step, micro_step, call):
        tokens = [count + 1 for count in COUNTS]
        dropped = [3, 0, 0, 0]  # 8, 1, 3 and 4 tokens for 5 slots each
        return [
            (step, None, micro_step, "forward", call, expert, tokens[expert], dropped[expert], 5, 12)
            for expert in range(4)
        ]

    def evaluation(step):
        return [(-1, step, 0, "evaluation", 0, e, COUNTS[e], 0, 50, 12) for e in range(4)]

    assert said == [
        *forward(0, 0, 0),
        *forward(0, 1, 0),
        *evaluation(0),
        *forward(1, 0, 0),
        *forward(1, 0, 1),
        *forward(1, 1, 0),
        *forward(1, 1, 1),
        *evaluation(1),
    ]
    assert {row["layer"] for row in rows} == {"blocks.0.moe"}


def test_steps_that_are_not_to_be_recorded_have_no_loads(tmp_path):
    run, _ = record(tmp_path / "run", 2, publish, steps="1:2")
    steps = {(row["step"], row["after_step"]) for row in run.table("expert_loads").to_pylist()}
    assert steps == {(1, None), (-1, 1)}
    assert len(run.table("expert_layers")) == 2


def without(rank, world):
    hooks.step(0)
    dist.all_reduce(torch.ones(2))


def test_a_program_without_experts_has_empty_tables(tmp_path):
    run, _ = record(tmp_path / "run", 2, without)
    assert len(run.table("expert_layers")) == len(run.table("expert_loads")) == 0
