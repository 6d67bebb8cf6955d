"""Parameters that are never partitioned, on real gloo ranks."""

from __future__ import annotations

import pytest

from support.ranks import run_ranks
from support.recording import record

NORMS = {"zero_force_param_types": ["LayerNorm"]}
LINEARS = {"zero_allowed_param_types": ["Linear"]}
STAGES = (
    {"stage": 1},
    {"stage": 2},
    {"stage": 2, "gradient_reduction": "reduce_scatter"},
    {"stage": 2, "use_multi_rank_bucket_allreduce": False, "overlap_comm": True},
    {"stage": 3, "stage3_param_persistence_threshold": 0},
)


def train(rank, world, zero, others=None, steps=3):
    """Return the losses, and after each step the names of the parameters that are whole on this rank."""
    import torch

    import zero_runtime
    from zero_runtime.sharding.shards import shard_of

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(9, 12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 7), torch.nn.LayerNorm(7)
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        **(others or {}),
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(rank)
    losses, whole = [], []

    def look():
        shards = {name: shard_of(parameter) for name, parameter in model.named_parameters()}
        whole.append({name for name, shard in shards.items() if shard is None or shard.available})

    look()
    for _ in range(steps):
        inputs = torch.randn(2, 9, generator=generator).to(model[0].bias.dtype)
        loss = engine(inputs).float().sin().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        look()
    engine.destroy()
    return losses, whole


def several(rank, world, cases, others):
    return [[train(rank, world, zero | types, others)[0] for types in ({}, NORMS, LINEARS)] for zero in cases]


@pytest.mark.parametrize(
    ("others", "tolerance"),
    [({}, 1e-6), pytest.param({"bf16": {"enabled": True}}, 0.05, marks=pytest.mark.long)],
)
def test_losses_do_not_change(others, tolerance):
    for rank in run_ranks(2, several, STAGES, others):
        for plain, *kept in rank:
            assert all(loss == pytest.approx(plain, rel=tolerance) for loss in kept)


@pytest.mark.long
def test_at_stage_3_they_are_whole_from_the_start_and_are_gathered_once_a_step(tmp_path):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **NORMS}
    run, outcomes = record(tmp_path / "run", 2, train, zero)
    norms = {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert all(whole == norms for outcome in outcomes for whole in outcome["result"][1])
    rows = [row for row in run.table("collectives").to_pylist() if row["rank"] == 0 and row["step"] == 1]
    gathers = [
        (row["phase"], set(row["parameters"].split(",")))
        for row in rows
        if row["purpose"] == "parameter_gather"
    ]
    assert not any(names & norms for phase, names in gathers if phase != "optimizer")
    assert sorted(name for phase, names in gathers for name in names & norms) == sorted(norms)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [2, 3])
def test_their_gradients_are_summed_on_every_rank_in_buckets_of_their_own(tmp_path, stage):
    zero = {"stage": stage, "gradient_reduction": "reduce_scatter", **NORMS}
    run, _ = record(tmp_path / "run", 2, train, zero)
    sent = {
        (row["op"], row["intended_op"], frozenset(row["parameters"].split(",")))
        for row in run.table("collectives").to_pylist()
        if row["purpose"] == "gradient_reduce"
    }
    assert sent == {
        ("all_reduce", None, frozenset({"1.weight", "1.bias", "3.weight", "3.bias"})),
        ("all_to_all", "reduce_scatter", frozenset({"0.weight", "0.bias", "2.weight", "2.bias"})),
    }
    numbers = [
        row["bucket"] for row in run.table("buckets").to_pylist() if row["step"] == 1 and row["rank"] == 0
    ]
    assert sorted(numbers) == list(range(len(numbers)))
