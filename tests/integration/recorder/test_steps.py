"""A training step extends from the end of the previous step to the end of its last optimizer step, and no further."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import commprof
from support.recording import calls, record

pytestmark = pytest.mark.ranks
STEPS, PAUSE = 4, 0.4


def trained(model, optimizer, inputs) -> None:
    loss = model(inputs).sum()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()


def made():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def evaluated(model) -> None:
    model.eval()
    with torch.no_grad():
        total = model(torch.ones(1, 4)).sum()
        time.sleep(PAUSE)
        model(torch.ones(1, 4))
    dist.all_reduce(total)
    model.train()


def with_everything_after(rank, world, names_steps):
    """Train two epochs with an evaluation after each, then a checkpoint on rank 0, and a last gather."""
    model, optimizer = made()
    for number in range(STEPS):
        if names_steps:
            commprof.step(number)
        trained(model, optimizer, torch.ones(2, 4))
        if number % 2:
            evaluated(model)
    if rank == 0:
        time.sleep(PAUSE)
        torch.save(model.state_dict(), "/dev/null")
    dist.barrier()
    dist.all_reduce(torch.ones(1000))
    time.sleep(PAUSE)


@pytest.mark.sampled
@pytest.mark.parametrize("names_steps", [False, True])
def test_evaluations_checkpoints_and_the_rest_are_outside_all_steps(tmp_path, names_steps):
    run, _ = record(tmp_path / "run", 2, with_everything_after, names_steps)
    for rank in range(2):
        rows = calls(run, rank, "step", "after_step", "op", "numel")
        step = [("all_reduce", 16), ("all_reduce", 4)]
        assert rows == [
            *[(number, None, *row) for number in (0, 1) for row in step],
            (-1, 1, "all_reduce", 1),
            *[(number, None, *row) for number in (2, 3) for row in step],
            (-1, 3, "all_reduce", 1),
            (-1, 3, "barrier", 0),
            (-1, 3, "all_reduce", 1000),
        ]
        steps = [row for row in run.table("steps").to_pylist() if row["rank"] == rank]
        assert [row["step"] for row in steps] == list(range(STEPS))
        outside = [row for row in run.table("outside_steps").to_pylist() if row["rank"] == rank]
        evaluations = [row for row in outside if row["phase"] == "evaluation"]
        assert [(row["after_step"], row["passes"]) for row in evaluations] == [(1, 2), (3, 2)]
        assert all(row["end_ns"] - row["begin_ns"] > PAUSE * 1e9 for row in evaluations)
        # No step includes anything outside the steps, however long the machine takes for a step.
        for row in outside:
            assert steps[row["after_step"]]["end_ns"] <= row["begin_ns"]
            assert all(row["end_ns"] <= step["begin_ns"] for step in steps[row["after_step"] + 1 :])
        assert outside[-1]["phase"] == "other" and outside[-1]["after_step"] == STEPS - 1
    assert any(row["phase"] == "checkpoint" for row in run.table("outside_steps").to_pylist())


def with_inputs_of_every_step(rank, world):
    model, optimizer = made()
    for _ in range(STEPS):
        time.sleep(PAUSE)
        dist.broadcast(torch.ones(3), 0)
        trained(model, optimizer, torch.ones(2, 4))


@pytest.mark.long
def test_loading_its_input_belongs_to_a_step(tmp_path):
    run, _ = record(tmp_path / "run", 2, with_inputs_of_every_step)
    inputs = [step for step, op in calls(run, 0, "step", "op") if op == "broadcast"]
    assert inputs == [-1, 1, 2, 3]  # nothing shows that the first step had begun when its input arrived
    rows = [row for row in run.table("steps").to_pylist() if row["rank"] == 0]
    assert all(row["end_ns"] - row["begin_ns"] > PAUSE * 1e9 for row in rows[1:])
    assert [row["begin_ns"] for row in rows[1:]] == [row["end_ns"] for row in rows[:-1]]


def with_overflow(rank, world):
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for number in range(STEPS):
        loss = model(torch.ones(2, 4)).sum() * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        dist.all_reduce(torch.ones(5))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    dist.barrier()


@pytest.mark.long
def test_a_step_that_an_overflow_leaves_out_ends_too(tmp_path):
    run, _ = record(tmp_path / "run", 2, with_overflow)
    expected = [*((number, "all_reduce") for number in range(STEPS)), (-1, "barrier")]
    assert calls(run, 0, "step", "op") == expected
    rows = [row for row in run.table("steps").to_pylist() if row["rank"] == 0]
    assert [(row["step"], row["micro_steps"]) for row in rows] == [(number, 1) for number in range(STEPS)]


def with_a_teacher(rank, world):
    """Run a frozen model first in each step, as programs with teachers, encoders or the generator of a GAN do."""
    model, optimizer = made()
    teacher = torch.nn.Linear(4, 4)
    for _ in range(STEPS):
        with torch.no_grad():
            inputs = teacher(torch.ones(2, 4))
        dist.broadcast(inputs, 0)
        trained(model, optimizer, inputs)


@pytest.mark.long
def test_a_frozen_model_that_runs_in_each_step_is_no_evaluation(tmp_path):
    run, _ = record(tmp_path / "run", 2, with_a_teacher)
    assert [step for step, op in calls(run, 0, "step", "op") if op == "broadcast"] == [-1, 1, 2, 3]
    assert {row["phase"] for row in run.table("outside_steps").to_pylist()} == {"other"}


def in_backward(rank, world):
    model = torch.nn.Linear(4, 4)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():

        def step(p) -> None:
            dist.all_reduce(p.grad)
            optimizers[p].step()
            optimizers[p].zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS):
        model(torch.ones(2, 4)).sum().backward()
    dist.barrier()


def two_in_a_row(rank, world):
    model = torch.nn.Linear(4, 4)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    for _ in range(STEPS):
        model(torch.ones(2, 4)).sum().backward()
        for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):
            dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()


@pytest.mark.sampled
@pytest.mark.parametrize("body", [in_backward, two_in_a_row])
def test_several_optimizers_make_one_step(tmp_path, body):
    run, _ = record(tmp_path / "run", 2, body)
    steps = [step for step in range(STEPS) for _ in range(2)]
    assert calls(run, 0, "step") == [*steps, -1]
    rows = [row for row in run.table("steps").to_pylist() if row["rank"] == 0]
    assert [row["micro_steps"] for row in rows] == [1] * STEPS


LOADING, SAMPLES = 0.1, 8


def with_slow_input(rank, world):
    model, optimizer = made()
    for _ in range(STEPS):
        time.sleep(LOADING)
        trained(model, optimizer, torch.ones(SAMPLES, 4))
        commprof.metric("samples", SAMPLES)
        evaluated(model)


@pytest.mark.long
def test_samples_per_second_are_of_the_loading_and_the_steps_but_not_of_evaluations(tmp_path):
    from commprof.analysis import api

    run, _ = record(tmp_path / "run", 2, with_slow_input)
    rate = api.resources([run.path])["samples_per_second"].iloc[0]
    assert 2 * SAMPLES / (LOADING + PAUSE) < rate <= 2 * SAMPLES / LOADING  # the samples of both ranks
