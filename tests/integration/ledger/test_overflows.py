"""``commprof verify`` of runs with steps that were skipped after an overflow.

No message shows which steps were skipped.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from commprof.ledger.verification import verify
from support.changed_runs import Changed
from support.recording import record

pytestmark = pytest.mark.ranks

BAD = (0, 2, 5)  # steps in which one rank's gradients are infinite
STEPS = 9
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
BF16 = {"bf16": {"enabled": True}}


def optimizer(kind, **params):
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}}


SIGNS = optimizer("OneBitAdam", freeze_step=2)
ZERO_ONE = optimizer(
    "ZeroOneAdam", var_freeze_step=3, var_update_scaler=1, local_step_scaler=1, local_step_clipper=2
)
CASES = {
    "signs, fp16": (3, SIGNS | FP16),
    "two ranks": (2, SIGNS | FP16),
    "autocast": (2, SIGNS | AUTOCAST | {"gradient_accumulation_steps": 2}),
    "bf16": (2, SIGNS | BF16),
    "0/1 Adam": (3, ZERO_ONE | FP16),
    "1-bit Lamb": (2, optimizer("OneBitLamb", freeze_step=2) | FP16),
    "one rank": (1, SIGNS | FP16),
    "no signs": (2, optimizer("AdamW") | FP16),
    "no signs, autocast": (2, optimizer("AdamW") | AUTOCAST),
}
# Stages with shards. At stage 3 all parameters of this model stay gathered, unless the threshold is 0.
PARTITIONED = {
    f"stage {stage}, {name}": (
        2,
        optimizer("AdamW") | precision | {"zero_optimization": {"stage": stage, **zero}},
    )
    for stage, zero in ((1, {}), (2, {}), (3, {}), (3, {"stage3_param_persistence_threshold": 0}))
    for name, precision in (
        ("fp32", {}),
        ("fp16", FP16),
        ("fp16, two", FP16 | {"gradient_accumulation_steps": 2}),
    )
    for name in [f"{name}, nothing stays" if zero else name]
}
QUICK_PARTITIONED = ("stage 1, fp32", "stage 3, fp16", "stage 3, fp16, two, nothing stays")
QUICK = "signs, fp16"
QUICK_FIRST = [pytest.param(name, marks=[] if name == QUICK else pytest.mark.long) for name in CASES]


def train(rank, world, config, begin=0, folder=None, late=0):
    """Take steps ``begin`` to STEPS.

    Compression to signs begins ``late`` steps later than in the configuration.
    """
    import torch

    import zero_runtime

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 70), torch.nn.ReLU(), torch.nn.Linear(70, 3))
    config = {"train_micro_batch_size_per_gpu": 2, **config}
    engine, inner, *_ = zero_runtime.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    if begin:
        engine.load_checkpoint(folder)
    if late:
        inner.optimizer._freeze_step += late
    kind = next(model.parameters()).dtype
    for step in range(begin, STEPS):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(torch.randn(2, 33, dtype=kind)).float().square().mean()
            engine.backward(loss * float("inf") if step in BAD and rank == 0 else loss)
            engine.step()
        if folder is not None and step + 1 == 4 and not begin:
            engine.save_checkpoint(folder)
    engine.destroy()
    return engine.skipped_steps


@functools.cache
def recorded(name, *args):
    world, config = {**CASES, **PARTITIONED}[name]
    run, outcomes = record(Path(tempfile.mkdtemp()) / "run", world, train, config, *args)
    assert {each["result"] for each in outcomes} == {len(BAD)}
    return run


@pytest.mark.parametrize("name", QUICK_FIRST)
def test_every_byte_is_explained(name):
    verdict = verify(recorded(name))
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict.sentences
    assert any("Steps 0,2,5: a gradient overflowed" in sentence for sentence in verdict.sentences)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK_PARTITIONED else pytest.mark.long) for name in PARTITIONED],
)
def test_a_skipped_step_gathers_nothing_at_its_end_and_the_next_one_more(name):
    verdict = verify(recorded(name))
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict.sentences
    ended = "Steps 0,2,5: " + ("a gradient overflowed" if "fp32" in name else "ended at the overflow check")
    assert any(sentence.startswith(ended) for sentence in verdict.sentences), verdict.sentences


def test_signs_that_come_later_than_asked_for_are_named():
    verdict = verify(recorded(QUICK, 0, None, 1))
    assert str(verdict.state) == "mismatch"
    # Signs are sent from the third step that is taken.
    assert {(each.purpose, each.steps) for each in verdict.unexplained} >= {("gradient_reduce", "4")}


def test_signs_in_a_step_that_was_not_taken_are_named():
    def moved(row):
        again = row["purpose"] == "gradient_reduce" and row["step"] == 6
        return [row, row | {"step": 5, "seq": row["seq"] + 10**6}] if again else [row]

    verdict = verify(Changed(recorded(QUICK), moved))
    assert str(verdict.state) == "mismatch"
    assert {(each.purpose, each.steps) for each in verdict.unexplained} == {("gradient_reduce", "5")}


@pytest.mark.long
@pytest.mark.parametrize("name", ["two ranks", "0/1 Adam"])
def test_steps_before_a_checkpoint_count(tmp_path, name):
    recorded(name, 0, str(tmp_path))
    verdict = verify(recorded(name, 4, str(tmp_path)))
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict.sentences
