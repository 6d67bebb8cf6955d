"""Programs that call ``initialize`` again after training.

The steps continue their numbering, and the config of each engine applies to its own steps.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import commprof
import zero_runtime
from commprof.analysis import api
from commprof.cli import execute
from commprof.ledger.verification import verify
from commprof.trace.reader import open_run
from support.changed_runs import Changed
from support.ranks import run_ranks
from support.recording import record

pytestmark = pytest.mark.ranks
WIDTH = 8


def pipelines(rank, world):
    """Train two steps of two micro-batches, then two steps of four micro-batches with the same layers.

    The second training comes after an evaluation.
    """
    layers = [zero_runtime.LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    model = zero_runtime.PipelineModule(layers, loss_fn=nn.functional.mse_loss)
    data = torch.ones(8, WIDTH)
    for micro_batches in (2, 4):
        config = {
            "train_micro_batch_size_per_gpu": 8 // micro_batches,
            "pipeline_parallel": {"pp_size": 2, "micro_batches": micro_batches},
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 1},
        }
        engine, *_ = zero_runtime.initialize(model=model, config=config)
        engine.train_batch(data=data, targets=data)
        engine.eval_batch(data=data, targets=data)
        engine.train_batch(data=data, targets=data)


def replicas(rank, world, stage, widths, folder=None):
    """Train an engine for each width in ``widths``.

    With ``folder``, later engines continue from the state of the previous engine.
    """
    for number, width in enumerate(widths):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, 1))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": number + 1,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = zero_runtime.initialize(model=model, config=config)
        if folder is not None and number:
            engine.load_checkpoint(folder)
        for _ in range(2 * (number + 1)):
            engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
            engine.step()
        if folder is not None:
            engine.save_checkpoint(folder)


@functools.cache
def two_pipelines():
    return record(Path(tempfile.mkdtemp()) / "run", 2, pipelines)[0]


def numbers(run):
    return sorted({row["step"] for row in run.table("steps").to_pylist()})


def test_two_engines_are_explained():
    run = two_pipelines()
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained, verdict.disagreements) == ("closed", (), ()), verdict
    assert verdict.issued_bytes == verdict.explained_bytes + verdict.labelled_bytes > 0
    assert any("2 engines" in said and "begin at steps 0, 2." in said for said in verdict.sentences)
    assert numbers(run) == [0, 1, 2, 3] and api.overview(run)["steps"] == 4


@pytest.mark.parametrize("step", [1, 3])
def test_a_missing_message_is_named_whichever_engine_sent_it(step):
    def without(row):
        lost = (row["step"], row["micro_step"], row["purpose"], row["phase"]) == (
            step,
            1,
            "pipeline",
            "forward",
        )
        return [] if lost else [row]

    verdict = verify(Changed(two_pipelines(), without))
    (missing,) = verdict.unexplained
    assert (missing.kind, missing.op, missing.steps, missing.count) == ("missing", "send", str(step), 1)


@pytest.mark.long
def test_engines_of_different_models_cannot_be_told(tmp_path):
    run, _ = record(tmp_path / "run", 2, replicas, 1, (WIDTH, 3))
    verdict = verify(run)
    assert str(verdict.state) == "unknown" and "different parameters" in verdict.request_reason


def validated(rank, world, with_training_before, with_optimizer):
    """Run engines that only validate, each with its own model.

    They run before the training or between two trainings.
    """
    for trains in [True, False, False, True] if with_training_before else [False, True]:
        torch.manual_seed(0)
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
        if trains or with_optimizer:
            config["optimizer"] = {"type": "AdamW"}
        engine, *_ = zero_runtime.initialize(model=nn.Linear(WIDTH, 1), config=config)
        if not trains:
            engine.eval()
            with torch.no_grad():
                engine(torch.ones(2, WIDTH))
            continue
        for _ in range(2):
            engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
            engine.step()


@pytest.mark.sampled
@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("with_training_before", [True, False])
def test_engines_that_only_validate_are_explained(tmp_path, with_training_before, with_optimizer):
    run, _ = record(tmp_path / "run", 2, validated, with_training_before, with_optimizer)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict
    begun = "4 engines" if with_training_before else "2 engines"
    idle = "2 of them" if with_training_before else "1 of them"
    assert any(begun in said and f"{idle} took no step." in said for said in verdict.sentences)

    def with_another_broadcast(row):
        return [row, row] if row["purpose"] == "parameter_broadcast" and row["payload_bytes"] > 4 else [row]

    assert str(verify(Changed(run, with_another_broadcast)).state) == "mismatch"


def adversaries(rank, world, widths, passes, late):
    """Train a GAN: two engines of ``widths`` that train in the same step, the second ``passes`` times."""

    def make(width):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 1},
        }
        return zero_runtime.initialize(model=model, config=config)[0]

    def train(engine):
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()

    generator = make(widths[0])
    if late:
        train(generator)
    discriminator = make(widths[1])
    for _ in range(3):
        train(generator)
        for _ in range(passes):
            train(discriminator)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("widths", "passes", "late"),
    [
        ((WIDTH, WIDTH), 1, False),
        ((WIDTH, 3), 1, False),
        ((WIDTH, WIDTH), 2, False),
        ((WIDTH, WIDTH), 1, True),
    ],
)
def test_engines_that_train_together_are_not_told_apart(tmp_path, widths, passes, late):
    run, _ = record(tmp_path / "run", 2, adversaries, widths, passes, late)
    verdict = verify(run)
    assert (str(verdict.state), verdict.exit_code, verdict.unexplained) == ("unknown", 3, ()), verdict
    assert "several engines whose steps have the same numbers, as in a GAN" in verdict.request_reason
    assert not any("after the one before it had trained" in said for said in verdict.sentences)
    levels = api.reduction_levels([run]).set_index("level")
    assert levels.loc["requested", "reason"] == verdict.request_reason
    assert levels.loc[["issued"], "op"].tolist() == ["all_reduce"]


def destroyed(rank, world):
    """Take as many steps as the model has parameters.

    ``destroy()`` gathers each of the parameters.
    """
    engine, *_ = zero_runtime.initialize(
        model=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    for _ in range(4):
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()
    engine.destroy()


@pytest.mark.long
def test_the_gathers_of_destroy_are_listed_apart_in_total(tmp_path, capsys):
    run, _ = record(tmp_path / "run", 2, destroyed)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict
    execute(["verify", str(run.path)])
    steps, _, apart = capsys.readouterr().out.partition(
        "Not in every step, or outside of the steps, in total"
    )
    assert "evaluation" not in steps + apart and "parameter_access" not in steps
    # The elements of two layers in fp32. The last bias is padded to one element for each rank.
    size = str(4 * (WIDTH * WIDTH + WIDTH + WIDTH + 2))
    own = apart.partition("parameter_access")[2]
    assert ["issued", "all_gather", "4", size, "B"] in [line.split()[:5] for line in own.splitlines()]


def mode_of_the_model(rank, world):
    """Train two epochs with a validation after each.

    After the validation only the model, and not the engine, is set to training mode, as in Lightning.
    """
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = zero_runtime.initialize(model=nn.Linear(WIDTH, 1), config=config)
    for _ in range(2):
        for _ in range(2):
            engine(torch.ones(2, WIDTH)).square().mean().backward()
            engine.step()
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(2, WIDTH))
        engine.module.train()


@pytest.mark.long
def test_steps_are_told_where_only_the_model_is_set_to_train(tmp_path):
    run, _ = record(tmp_path / "run", 2, mode_of_the_model)
    assert numbers(run) == [0, 1, 2, 3] and api.overview(run)["steps"] == 4
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict


@pytest.mark.long
@pytest.mark.parametrize("stage", range(4))
def test_engines_of_every_stage(tmp_path, stage):
    run, _ = record(tmp_path / "run", 2, replicas, stage, (WIDTH,) * 3)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict
    assert numbers(run) == list(range(6))


@pytest.mark.long
def test_one_that_goes_on_from_a_checkpoint_keeps_its_numbers(tmp_path):
    run, _ = record(tmp_path / "run", 2, replicas, 2, (WIDTH,) * 2, tmp_path / "saved")
    assert str(verify(run).state) == "closed" and numbers(run) == list(range(4))


def in_turn(rank, world, folders):
    """Run one training in the first recording, and two consecutive trainings in the second."""
    for number, folder in enumerate(folders):
        commprof.attach(folder)
        replicas(rank, world, 2, [WIDTH] * (number + 1))
        commprof.detach()


@pytest.mark.long
def test_a_second_recording_of_a_process_begins_with_its_own_initialisation_and_step_0(tmp_path):
    folders = [str(tmp_path / "first"), str(tmp_path / "second")]
    run_ranks(2, in_turn, folders)
    for folder, steps in zip(folders, ([0, 1], [0, 1, 2, 3]), strict=True):
        run = open_run(folder)
        rows = run.table("collectives").to_pylist()
        assert numbers(run) == steps and {row["step"] for row in rows} == {-1, *steps}
        made = [row for row in rows if row["purpose"] == "parameter_broadcast"]
        assert made and made[0]["step"] == -1
        assert {row["purpose"] for row in rows if row["step"] == -1} == {"parameter_broadcast"}
        assert str(verify(run).state) == "closed"
