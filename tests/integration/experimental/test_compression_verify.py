"""``commprof verify`` of runs with compressed gradients.

The bytes must be explained by name, or reported as not covered.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import pytest
import torch

import zero_runtime
from commprof.ledger.verification import verify
from support.changed_runs import Changed
from support.recording import record
from support.standing_ranks import record_standing

pytestmark = pytest.mark.ranks

WARMUP, STEPS = 2, 5
CASES = {
    "topk": {"gradient_compression": {"algorithm": "topk", "topk_ratio": 0.02}},
    "1bit, warming up": {"gradient_compression": {"algorithm": "1bit", "warmup_steps": WARMUP}},
    "coded": {"gradient_compression": {"algorithm": "topk", "huffman_coding": True}},
}
NUMEL = 4 * (64 * 64 + 64)


def train(rank, world, keys):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 9000},
        **keys,
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(2, 64)).square().mean())
        engine.step()


@functools.cache
def recorded(name):
    """Return the run and its verdict."""
    run, _ = record_standing(Path(tempfile.mkdtemp()) / "run", 2, train, CASES[name])
    return run, verify(run)


def gradient_rows(name):
    return [
        row
        for row in recorded(name)[0].table("collectives").to_pylist()
        if row["purpose"] == "gradient_reduce"
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["topk", "1bit, warming up"])
def test_every_byte_is_explained(name):
    verdict = recorded(name)[1]
    assert (str(verdict.state), verdict.unexplained) == ("closed", ())
    assert verdict.issued_bytes == verdict.explained_bytes + verdict.labelled_bytes > 0


def test_the_traffic_falls_once_the_warm_up_is_over():
    mine = [row for row in gradient_rows("1bit, warming up") if row["rank"] == 0]
    for step in range(STEPS):
        rows = [row for row in mine if row["step"] == step]
        sent = sum(row["input_bytes"] for row in rows)
        if step < WARMUP:
            assert sent == 4 * NUMEL and {row["op"] for row in rows} == {"all_reduce"}
        else:
            assert NUMEL / 8 < sent < 1.05 * NUMEL / 8
            assert {(row["op"], row["intended_op"]) for row in rows} == {("all_gather", "all_reduce")}


@pytest.mark.long
def test_buckets_keep_their_uncompressed_size():
    run, _ = recorded("topk")
    rows = [row for row in gradient_rows("topk") if row["rank"] == 0 and row["step"] == 1]
    assert sum(row["bucket_bytes"] for row in rows) == 4 * NUMEL
    assert sum(row["input_bytes"] for row in rows) == pytest.approx(2 * 0.02 * 4 * NUMEL, rel=0.02)
    assert run.table("buckets").num_rows


def test_what_depends_on_values_is_held_to_its_bounds():
    run, verdict = recorded("coded")
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict
    assert "an estimate, which depends on the size of coded payloads" in str(verdict.sentences)
    buckets = sum(row["rank"] == 0 and row["step"] == 1 for row in run.table("buckets").to_pylist())
    reduced = next(row for row in verdict.rows if row.purpose == "gradient_reduce")
    assert reduced.issued_count == reduced.expected_count == 2 * buckets * STEPS
    assert reduced.issued_payload_bytes <= reduced.expected_payload_bytes

    def without_a_length(row):
        return (
            []
            if row["step"] == 2 and row["purpose"] == "gradient_reduce" and row["payload_bytes"] == 16
            else [row]
        )

    def larger(row):
        grown = row["step"] == 2 and row["purpose"] == "gradient_reduce" and row["payload_bytes"] > 16
        return [row | {"payload_bytes": 10 * row["payload_bytes"]}] if grown else [row]

    for change, kind in ((without_a_length, "missing"), (larger, "unexplained")):
        named = verify(Changed(run, change))
        assert str(named.state) == "mismatch"
        assert {(each.kind, each.steps, each.purpose) for each in named.unexplained} == {
            (kind, "2", "gradient_reduce")
        }


def hosts(rank, world, coded):
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    block = {"algorithm": "topk", "hierarchical_compress": True, "huffman_coding": coded}
    train(rank, world, {"gradient_compression": block})


@pytest.mark.long
@pytest.mark.parametrize("coded", [False, True])
def test_what_hosts_send_each_other_is_explained(tmp_path, coded):
    run, _ = record(tmp_path / "run", 4, hosts, coded)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict
    reduced = {row.issued_op for row in verdict.rows if row.purpose == "gradient_reduce"}
    assert reduced == {"all_to_all", "all_gather"}


QUANTISED = {
    "both": {"zero_quantized_weights": True, "zero_quantized_gradients": True},
    "one by one": {"zero_quantized_weights": True, "stage3_allgather_sequential": True},
    "frozen": {"zero_quantized_nontrainable_weights": True},
    "secondary": {"zero_quantized_weights": True, "zero_hpz_partition_size": 2},
}


def quantised(rank, world, name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    if name == "frozen":
        model[0].weight.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 9000, "stage3_param_persistence_threshold": 100,
                              **QUANTISED[name]},
    }  # fmt: skip
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(4):
        engine.backward(engine(torch.randn(2, 64)).square().mean())
        engine.step()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "both")) for name in QUANTISED]
)
def test_quantised_messages_of_stage_3_are_explained(tmp_path, name):
    run, _ = record_standing(tmp_path / "run", 4 if name == "secondary" else 2, quantised, name)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict
    rows = [row for row in run.table("collectives").to_pylist() if row["rank"] == 0 and row["step"] == 2]
    assert any(row["dtype"] == "uint8" and row["purpose"] == "parameter_gather" for row in rows)
