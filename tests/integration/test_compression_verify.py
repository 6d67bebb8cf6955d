"""``commprof verify`` of runs whose gradients travel compressed: explained by name, or said not to be covered."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch

import zero_runtime
from commprof.ledger.verification import verify
from support.recording import record

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
    """The run, and its verdict."""
    run, _ = record(Path(tempfile.mkdtemp()) / "run", 2, train, CASES[name])
    return run, verify(run)


def gradient_rows(name):
    return [
        row
        for row in recorded(name)[0].table("collectives").to_pylist()
        if row["purpose"] == "gradient_reduce"
    ]


@pytest.mark.parametrize("name", ["topk", "1bit, warming up"])
def test_every_byte_is_explained(name):
    verdict = recorded(name)[1]
    assert (str(verdict.state), verdict.unexplained) == ("closed", ())
    assert verdict.issued_bytes == verdict.explained_bytes > 0


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


def test_buckets_keep_their_uncompressed_size():
    run, _ = recorded("topk")
    rows = [row for row in gradient_rows("topk") if row["rank"] == 0 and row["step"] == 1]
    assert sum(row["bucket_bytes"] for row in rows) == 4 * NUMEL
    assert sum(row["input_bytes"] for row in rows) == pytest.approx(2 * 0.02 * 4 * NUMEL, rel=0.02)
    assert run.table("buckets").num_rows


def test_what_depends_on_values_is_said_not_to_be_covered():
    verdict = recorded("coded")[1]
    assert str(verdict.state) == "unknown"
    assert "gradient_compression.huffman_coding is True" in str(verdict)
