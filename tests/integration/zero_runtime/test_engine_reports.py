"""The output of rank 0 during training: progress, times, memory, and monitors."""

from __future__ import annotations

import contextlib
import csv
import gc
import io
import re
import sys

import pytest

import zero_runtime
from support.ranks import run_ranks
from support.recorded_models import make_batch, make_model
from zero_runtime import ConfigError

pytestmark = pytest.mark.ranks


def said(rank, directory, steps=4, **top):
    """Train ``steps`` steps of two micro-batches.

    Returns the output of this rank, the losses, and the engine.
    """
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        **top,
    }
    errors, losses = io.StringIO(), []
    with contextlib.redirect_stderr(errors):
        engine, *_ = zero_runtime.initialize(model=make_model("mlp"), config=config)
        for step in range(steps):
            for micro in range(2):
                loss = engine(*make_batch("mlp", step, micro, rank))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    return errors.getvalue().splitlines(), losses, engine


def printed(rank, world):
    quiet, *_ = said(rank, None)
    progress, *_ = said(rank, None, steps_per_print=2)
    each, _, engine = said(rank, None, wall_clock_breakdown=True, steps=2)
    timers = engine.get_wall_clock_timers()
    stage_3, *_ = said(
        rank, None, wall_clock_breakdown=True, steps_per_print=4, zero_optimization={"stage": 3}
    )
    memory, *_ = said(rank, None, memory_breakdown=True, steps=1)
    return quiet, progress, each, timers, stage_3, memory


def test_rank_0_says_what_the_configuration_asks_for():
    (quiet, progress, each, timers, stage_3, memory), others = run_ranks(2, printed)
    assert quiet == [] and others[:3] == ([], [], []) and others[4:] == ([], [])
    assert progress[:2] == [
        f"zero_runtime: step={step}, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]" for step in (2, 4)
    ]
    speed = r"epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=[\d.]+, CurrSamplesPerSec=[\d.]+"
    assert len(progress) == 3 and re.fullmatch(f"zero_runtime: {speed}", progress[2])
    # The times are those of the whole step, and of the communication within each part.
    # The line does not include messages that were sent before the first step.
    assert len(each) == 2 and "step 1, ms: forward" in each[0]
    part = r"[\d.]+ \(gradient_norm [\d.]+, parameter_gather [\d.]+\)"
    assert re.search(
        rf"step 2, ms: forward [\d.]+, backward [\d.]+ \(gradient_reduce [\d.]+\), optimizer {part}$", each[1]
    )
    assert set(timers) == {"forward", "backward", "optimizer"} and all(value > 0 for value in timers.values())
    assert len(stage_3) == 3  # the progress, the mean times of four steps, and samples per second
    assert "step 4, ms, mean of 4 steps: " in stage_3[1] and "forward" in stage_3[1]
    assert [line.split(": ")[1] for line in memory] == [
        "after forward",
        "after backward",
        "after forward",
        "after backward",
        "after step",
    ]
    assert all(re.search(r"process [\d.]+ GiB resident \(peak [\d.]+ GiB\)", line) for line in memory)


def monitored(rank, world, directory):
    where = {"enabled": True, "output_path": str(directory / "events"), "job_name": "mine"}
    _, losses, _ = said(rank, directory, csv_monitor=where, wall_clock_breakdown=True, steps=2)
    said(rank, directory, csv_monitor=where, steps=1)  # appends to the same files
    half = {"enabled": True, "initial_scale_power": 4, "auto_cast": True}
    where = {**where, "job_name": "fp16"}
    said(rank, directory, csv_monitor=where, fp16=half, steps=1)
    return losses


def rows(path):
    with path.open() as file:
        return list(csv.reader(file))


def test_the_csv_monitor_writes_one_file_for_each_quantity(tmp_path):
    losses = run_ranks(2, monitored, tmp_path)
    directory = tmp_path / "events" / "mine"
    assert {path.name for path in directory.iterdir()} == {
        "Train_Samples_lr.csv",
        "Train_Samples_train_loss.csv",
        *(f"Train_Samples_elapsed_time_ms_{part}.csv" for part in ("forward", "backward", "step")),
    }
    assert rows(directory / "Train_Samples_lr.csv") == [
        ["step", "lr"],
        ["16", "0.001"],
        ["32", "0.001"],
        ["16", "0.001"],
    ]
    header, *values = rows(directory / "Train_Samples_train_loss.csv")
    assert header == ["step", "train_loss"]
    assert [float(value) for _, value in values[:2]] == pytest.approx(
        [sum(losses[0][:2]) / 2, sum(losses[0][2:]) / 2], rel=1e-6
    )
    assert rows(tmp_path / "events" / "fp16" / "Train_Samples_loss_scale.csv") == [
        ["step", "loss_scale"],
        ["16", "16.0"],
    ]


def refused(rank, world, directory):
    found = []
    for top in (
        {"tensorboard": {"enabled": True, "output_path": str(directory)}},
        {"csv_monitor": {"enabled": True, "output_path": str(directory / "file")}},
        {"wandb": {"enabled": True}},
        {"comet": {"enabled": True}},
    ):
        try:
            said(rank, directory, steps=0, **top)
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def test_a_monitor_that_cannot_write_says_so_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if tensorboard were not installed
    (tmp_path / "file").write_text("in the way")
    ((tensorboard, files, wandb, comet),) = run_ranks(1, refused, tmp_path)
    assert "the package tensorboard is not installed" in tensorboard and "csv_monitor" in tensorboard
    assert f"csv_monitor cannot write to {tmp_path / 'file'}" in files
    assert "no monitoring by Weights & Biases; use csv_monitor" in wandb and "no monitoring by Comet" in comet


def collected(rank, world):
    said(rank, None, steps=1)
    before = gc.isenabled()
    *_, engine = said(rank, None, steps=1, disable_python_gc=True)
    found = before, gc.isenabled()
    engine.destroy()
    return *found, gc.isenabled()


def test_garbage_collection_can_be_off_while_training():
    assert run_ranks(1, collected) == [(True, False, True)]
