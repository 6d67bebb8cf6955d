"""The order in which pipeline ranks compute and send, under each schedule: as planned and as recorded.

``python tests/integration/zero_runtime/test_pipeline_order.py`` writes the golden trace again. Review the
difference first.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

import pytest
import torch
from torch import nn

import zero_runtime
from commprof.ledger.verification import verify
from support.pipelines import MICRO_BATCHES, SCHEDULES, WIDTH, config, scheduled
from support.recording import calls, record
from zero_runtime.pipeline.schedule.instructions import COMPUTATIONS, RECEIVES, SENDS, Action
from zero_runtime.pipeline.schedule.schedule_simulation import simulate
from zero_runtime.pipeline.schedule.step_plan import Plan

pytestmark = pytest.mark.ranks
GOLDEN = Path(__file__).parents[2] / "golden" / "pipeline_messages.csv"
COLUMNS = (
    "step",
    "phase",
    "purpose",
    "op",
    "micro_step",
    "group_desc",
    "group_ranks",
    "peer",
    "payload_bytes",
)


@cache
def recording(name):
    """Return the records and the plan of two ranks under a schedule, and the verdict of the ledger."""
    with tempfile.TemporaryDirectory() as folder:
        run, outcomes = record(Path(folder) / "run", 2, noted, SCHEDULES[name])
        rows = [calls(run, rank, *COLUMNS) for rank in range(2)]
        verdict = verify(run)
    return rows, [outcome["result"] for outcome in outcomes], verdict


class Mark(torch.autograd.Function):
    """An autograd function that calls ``function`` in the backward pass."""

    @staticmethod
    def forward(ctx, values, function):
        ctx.function = function
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.function()
        return gradient, None


class Noted(nn.Linear):
    """A layer that notes when it runs forward and backward, and when the gradients of its weights are computed."""

    notes: list[tuple[str, int]]

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.register_post_accumulate_grad_hook(lambda _: self.note("weights"))

    def note(self, what):
        Noted.notes.append((what, id(self)))

    def forward(self, values):
        self.note("forward")
        return Mark.apply(super().forward(values), lambda: self.note("backward"))


NAMES = {
    Action.FORWARD: ["forward"],
    Action.BACKWARD: ["backward", "weights"],
    Action.BACKWARD_INPUT: ["backward"],
    Action.BACKWARD_WEIGHT: ["weights"],
}


def noted(rank, world, schedule):
    """Train two steps with one layer in each part.

    Returns the plan of the last step.
    """
    Noted.notes = []
    parts = 2 * schedule.get("virtual_stages", 1)
    layers = [zero_runtime.LayerSpec(Noted) for _ in range(parts)]
    engine = scheduled(layers, schedule, config(zero_optimization={"stage": 1}))
    data = torch.ones(2 * MICRO_BATCHES, WIDTH)
    for _ in range(2):
        Noted.notes.clear()
        engine.train_batch(data=data, targets=data)
    chunks = [id(layer) for layer in engine.module.forward_funcs]
    planned = [each for step in engine.plan.training(MICRO_BATCHES, rank) for each in step]
    assert [(what, chunks.index(layer)) for what, layer in Noted.notes] == [
        (name, chunk) for action, _, chunk in planned for name in NAMES.get(action, ())
    ]
    return [(str(action), number, chunk) for action, number, chunk in planned]


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_do_what_the_schedule_says_in_its_order(name):
    """Ranks execute the schedule in its order.

    The test compares the operations that torch ran and the messages of the trace. The simulated timeline has
    the same instructions.
    """
    rows, plans, verdict = recording(name)
    assert (
        str(verdict.state) == "closed"
        and verdict.issued_bytes == verdict.explained_bytes + verdict.labelled_bytes > 0
    ), verdict
    plan = Plan(name, 2, SCHEDULES[name].get("virtual_stages", 1))
    timeline = simulate(
        [plan.training(MICRO_BATCHES, stage) for stage in range(2)], chunks=plan.chunks, blocking=True
    )
    kinds = {
        ("send", "forward"): Action.SEND_ACTIVATION,
        ("recv", "forward"): Action.RECEIVE_ACTIVATION,
        ("send", "backward"): Action.SEND_GRADIENT,
        ("recv", "backward"): Action.RECEIVE_GRADIENT,
    }
    for rank, planned in enumerate(plans):
        messages = [
            (str(kinds[op, phase]), micro_batch)
            for step, phase, _, op, micro_batch, *_ in rows[rank]
            if op in ("send", "recv") and step == 1
        ]
        assert messages == [
            (action, number) for action, number, _ in planned if action in map(str, SENDS | RECEIVES)
        ]
        assert len(messages) == (24 if name == "interleaved" else 8)
        on_paper = [event.instruction for event in timeline.events if event.rank == rank]
        assert [(str(action), number, chunk) for action, number, chunk in on_paper] == [
            each for each in planned if each[0] in map(str, COMPUTATIONS)
        ]


def shown():
    """Return all records of all schedules as text."""
    for name in SCHEDULES:
        for rank, rows in enumerate(recording(name)[0]):
            for row in rows:
                yield [name, str(rank), *("" if value is None else str(value) for value in row)]


def test_the_golden_trace():
    """The golden trace has every record of two steps in order: purpose, group, peer, micro-batch and bytes."""
    with GOLDEN.open() as file:
        assert list(csv.reader(file)) == [["schedule", "rank", *COLUMNS], *shown()]


if __name__ == "__main__":
    with GOLDEN.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["schedule", "rank", *COLUMNS], *shown()])
