"""The keys that keep compressed training close to uncompressed training, on real ranks.

The tests check checkpoints, warnings and messages. test_compression_reference.py compares each step with a
simulation.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch

import zero_runtime
from commprof.ledger.verification import verify
from support.checkpoint_training import make_engine, train
from support.ranks import run_ranks
from support.recording import record
from support.standing_ranks import run_standing

pytestmark = pytest.mark.ranks

CORRECTED = {"topk_ratio": 0.1, "momentum_correction": True, "clip_before_residual": True}
SAVED = {
    "stage 0": (0, "fp32", CORRECTED, {}),
    "stage 2, micro-batches": (
        2,
        "fp32",
        CORRECTED | {"clip_before_residual": False},
        {"gradient_accumulation_steps": 2},
    ),
    "stage 1, fp16": (1, "fp16", CORRECTED, {"gradient_accumulation_steps": 2}),
    "stage 0, bf16, late": (0, "bf16", CORRECTED | {"warmup_steps": 4}, {}),
}


def save_and_resume(rank, world, root):
    found = {}
    for name, (stage, precision, keys, top) in SAVED.items():
        directory = Path(root) / name
        engine = make_engine(stage, precision, "SGD", gradient_compression=keys, **top)
        train(engine, rank, 0, 3, precision)
        engine.save_checkpoint(directory)
        stored = {key: each.clone() for key, each in engine._residuals.stored().items()}
        went_on = train(engine, rank, 3, 4, precision)
        again = make_engine(stage, precision, "SGD", gradient_compression=keys, **top)
        train(again, rank, 50, 1, precision)
        again.load_checkpoint(directory)
        found[name] = (went_on, train(again, rank, 3, 4, precision), stored, engine.get_mom())
    return found


def load_alone(rank, world, root):
    stage, precision, keys, top = SAVED["stage 0"]
    engine = make_engine(stage, precision, "SGD", gradient_compression=keys, **top)
    engine.load_checkpoint(Path(root) / "stage 0")
    stored = {
        name.removeprefix("pending "): each.clone() for name, each in engine._residuals.stored().items()
    }
    return stored, train(engine, rank, 3, 2, precision)


@pytest.mark.long
def test_the_momentum_goes_on_from_a_checkpoint_bit_by_bit(tmp_path):
    ranks = run_standing(2, save_and_resume, str(tmp_path), timeout=200)
    for found in ranks:
        for name, (went_on, resumed, stored, momenta) in found.items():
            assert resumed == went_on, name
            assert momenta == [0.9, 0.9]
            moved = [each for key, each in stored.items() if key.startswith("corrected momentum of ")]
            assert moved and sum(float(each.abs().sum()) for each in moved) > 0.0, name
    ((whole, losses),) = run_standing(1, load_alone, str(tmp_path))
    parts = [found["stage 0"][2] for found in ranks]
    assert whole.keys() == parts[0].keys() and all(loss == loss for loss in losses)
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, parts[0][name] + parts[1][name])


def said(rank, world, optimizer, keys, params=None):
    """Return the text that creating an engine writes to stderr, or the error that refuses the engine."""
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        try:
            make_engine(0, optimizer=optimizer, params=params or {}, gradient_compression=keys)
        except zero_runtime.errors.ConfigError as error:
            return f"refused: {error}"
    return stream.getvalue()


def said_of_all(rank, world):
    return {
        name: said(rank, world, *case)
        for name, case in {
            "momentum": ("SGD", {"topk_ratio": 0.1}),
            "corrected": ("SGD", CORRECTED),
            "without error feedback": ("SGD", {"error_feedback": False}),
            "AdamW": ("AdamW", {"algorithm": "1bit"}),
            "signs": ("SGD", {"algorithm": "1bit", "momentum_correction": True}),
            "AdamW, corrected": ("AdamW", CORRECTED),
            "first moment": ("AdamW", {"topk_ratio": 0.1}),
            "no first moment": ("AdamW", {"topk_ratio": 0.1}, {"betas": [0.0, 0.99]}),
        }.items()
    }


def test_momentum_after_decompression_is_warned_of_by_one_rank():
    first, second = run_ranks(2, said_of_all)
    for name, words in (
        ("momentum", "SGD applies its momentum after decompression"),
        ("signs", "algorithm 1bit with the momentum of SGD"),
        ("first moment", "AdamW adds its first moment"),
    ):
        assert first[name].count("gradient_compression") == 1 and words in first[name], first[name]
        assert "gradient_compression" not in second[name]
    for name in ("corrected", "without error feedback", "AdamW", "no first moment"):
        assert "gradient_compression" not in first[name] + second[name]
    for each in (first, second):
        assert each["AdamW, corrected"].startswith("refused: gradient_compression.momentum_correction")


STEPS, WARMUP, FALL = 7, 1, 4
FALLING = {"topk_ratio": 0.01, "topk_warmup_ratio": 0.16, "topk_warmup_steps": FALL, "warmup_steps": WARMUP}


def train_recorded(rank, world, stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 9000},
        "gradient_compression": FALLING | {"clip_before_residual": True, "residual_decay": 0.9},
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    norms = []
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(2, 64)).square().mean())
        engine.step()
        norms.append(engine.get_residual_norm())
    return norms


@pytest.mark.parametrize("stage", [0, 2])
def test_a_falling_ratio_is_verified_step_by_step(stage, tmp_path):
    run, outcomes = record(tmp_path / "run", 2, train_recorded, stage)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict
    rows = [row for row in run.table("collectives").to_pylist() if row["rank"] == 0]
    numel = 4 * (64 * 64 + 64)
    sent = [
        sum(row["input_bytes"] for row in rows if row["step"] == step and row["purpose"] == "gradient_reduce")
        for step in range(STEPS)
    ]
    assert sent[0] == 4 * numel
    assert sent[1:] == pytest.approx(
        [8 * share * numel for share in (0.16, 0.08, 0.04, 0.02, 0.01, 0.01)], rel=0.01
    )
    # Stage 0 needs the norm of the sum only for clipping. Stage 2 publishes the norm.
    assert bool([row for row in rows if row["purpose"] == "gradient_norm"]) == (stage == 2)
    norms = [
        (row["rank"], row["value"])
        for row in run.table("metrics").to_pylist()
        if row["name"] == "residual_norm"
    ]
    for rank, outcome in enumerate(outcomes):
        found = outcome["result"]
        assert found[0] is None and all(each > 0 for each in found[WARMUP:])
        assert [value for number, value in norms if number == rank] == pytest.approx(found[WARMUP:])
