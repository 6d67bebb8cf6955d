"""Test the phases of the training loops of libraries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from commprof import hooks
from commprof.recorder.adapters.checkpoints import Checkpoints
from commprof.recorder.adapters.trainers import Trainers


class Phases(hooks.Listener):
    def __init__(self):
        self.heard = []

    def on_phase(self, name):
        self.heard.append(name)


@pytest.fixture
def phases():
    listener = Phases()
    hooks.listen(listener)
    yield listener.heard
    hooks.listen(None)
    hooks.position.step, hooks.position.phase = -1, "init"


def evaluation_loop(phases):
    """Return the Trainer's evaluation loop as the recorder wraps it.

    The loop stores the phases up to its own begin.
    """
    (part,) = [
        each
        for each in Trainers(Checkpoints(SimpleNamespace())).parts()
        if each.path == "Trainer.evaluation_loop"
    ]
    return part.wrap(lambda trainer, batches, **options: (list(phases), batches, options))


def test_an_evaluation_of_the_trainer_with_deepspeed_is_none_of_the_next_step(phases):
    """The Trainer evaluates the model next to DeepSpeed's engine, which reports the phases."""
    evaluate = evaluation_loop(phases)
    trainer = SimpleNamespace(is_deepspeed_enabled=True)
    assert evaluate(trainer, 2) == ([], 2, {})  # This evaluation is before the first step.
    hooks.step(0)
    hooks.end_step()
    assert evaluate(trainer, 3, description="x") == (["evaluation"], 3, {"description": "x"})
    assert phases == ["evaluation", "other"]


def test_other_evaluations_of_the_trainer_are_left_to_detection(phases):
    hooks.step(0)
    assert evaluation_loop(phases)(SimpleNamespace(is_deepspeed_enabled=False), 3)[0] == []
