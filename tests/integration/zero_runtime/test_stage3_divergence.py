"""Ranks that run their modules in different orders at stage 3: all of them get the same error, and none hangs."""

from __future__ import annotations

import functools
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_runtime
from support.ranks import run_ranks
from zero_runtime import comm

pytestmark = pytest.mark.ranks

LAYERS, STEPS = 4, 6
PATIENCE = timedelta(seconds=0.4)
# Parameters stay gathered after the forward pass, or are released. If they are released, a rank also waits
# for other ranks in the backward pass.
MEMORY = {"kept": {}, "released": {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}}


@pytest.fixture(autouse=True)
def _ranks_look_early(monkeypatch):
    """Shorten the time before a waiting rank looks for an error.

    Only the time until an error depends on this.
    """
    monkeypatch.setattr(comm, "_PATIENCE", PATIENCE)


class Net(nn.Module):
    """Layers that run one after the other in the order of the caller."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.head = nn.Linear(8, 1)

    def forward(self, hidden, order):
        for number in order:
            hidden = torch.tanh(self.layers[number](hidden))
        return self.head(hidden).mean()


def train(unit, zero, orders, frozen=()):
    """Train one step for each of ``orders``.

    Returns the losses, or the error and the seconds until it was raised.
    """
    torch.manual_seed(0)
    model = Net()
    for number in frozen:
        model.layers[number].requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_gather_unit": unit, **zero},
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    began = time.monotonic()
    try:
        for order in orders:
            loss = engine(torch.ones(2, 8) * (dist.get_rank() + 1), order)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    except zero_runtime.errors.UsageError as error:
        return str(error), time.monotonic() - began
    return losses


USUAL = [0, 1, 2, 3]
# The order of the rank that deviates. All layers have the same size, so that values would be mixed up without
# a check.
OTHER = {"skips": [0, 2, 3], "swaps": [0, 2, 1, 3], "repeats": [0, 1, 2, 3, 3, 0], "stops": [0, 1, 2]}


def diverge(rank, world, unit, memory, step, which, kind):
    orders = [OTHER[kind] if rank == which and at == step else USUAL for at in range(STEPS)]
    return train(unit, MEMORY[memory], orders)


@functools.cache
def diverged(*case):
    return run_ranks(3, diverge, *case, timeout=60)


@pytest.mark.sampled(
    "block-kept-0-1-skips", "block-released-3-0-swaps", "module-released-0-0-skips", "module-kept-3-1-stops"
)
@pytest.mark.parametrize("kind", OTHER)
@pytest.mark.parametrize("which", [0, 1], ids=str)
@pytest.mark.parametrize("step", [0, 1, 3], ids=str)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("unit", ["module", "block"])
def test_a_rank_that_takes_another_branch(unit, memory, step, which, kind):
    outcomes = diverged(unit, memory, step, which, kind)
    texts = set()
    for rank, (text, seconds) in enumerate(outcomes):
        assert seconds < 30
        text, _, own = text.partition(". Found by rank ")
        assert int(own) == rank
        texts.add(text)
    (text,) = texts
    assert f"in pass {step + 1}," in text
    ranks = {int(number) for number in re.findall(r"rank (\d)", text)}
    assert which in ranks and len(ranks) == 2
    own, other = text.partition("Order of ")[2].partition(". All ranks")[0].split("; order of ")
    assert own.split(": ")[1] != other.split(": ")[1]
    assert "layers." in own and "layers." in other


def change_together(rank, world, unit, zero):
    """Run the same new orders on every rank, with one rank late."""
    orders = [USUAL, USUAL, *OTHER.values(), USUAL, USUAL, OTHER["swaps"], OTHER["swaps"]]
    if rank == 1:
        time.sleep(1.5 * PATIENCE.total_seconds())  # so that the other ranks look for an error
    return train(unit, zero, orders, frozen=(0,))


@pytest.mark.sampled
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("unit", ["module", "block"])
def test_ranks_that_run_the_same_new_order_go_on(unit, memory):
    outcomes = run_ranks(3, change_together, unit, MEMORY[memory], timeout=120)
    assert outcomes[0] == pytest.approx(stage_1()[0], rel=1e-6)
    assert outcomes[2] == pytest.approx(stage_1()[2], rel=1e-6)


@functools.cache
def stage_1():
    return run_ranks(3, change_together, "module", {"stage": 1}, timeout=120)
