"""``ignore_unused_parameters: false``, as in DeepSpeed.

A parameter that gets no gradient within a step raises an error.
"""

from __future__ import annotations

import pytest
import torch

import zero_runtime
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Switch(torch.nn.Module):
    """Two layers. A call uses the layers that its arguments name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, inputs, names):
        return sum(getattr(self, name)(inputs) for name in names)


def ended(rank, world, zero, windows, top):
    """Return the number of steps of training with ``windows``, or its error message.

    ``windows`` names the layers of each micro-batch.
    """
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam"},
        "zero_optimization": zero,
        **top,
    }
    engine, *_ = zero_runtime.initialize(model=Switch(), config=config)
    try:
        for micro_batch in windows:
            engine.backward(engine(torch.ones(2, 4, dtype=engine.get_data_types()[0]), micro_batch).sum())
            engine.step()
    except AssertionError as error:
        return str(error)
    return engine.global_steps


BOTH, FIRST, SECOND = ("first", "second"), ("first",), ("second",)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize("stage", [1, 2])
def test_an_unused_parameter_is_named_on_every_rank(stage):
    zero = {"stage": stage, "ignore_unused_parameters": False, **OFFLOAD}
    for said in run_ranks(2, ended, zero, [BOTH, BOTH, FIRST, FIRST], {"bf16": {"enabled": True}}):
        assert "2 of 4 parameters got no gradient in this step: second.weight, second.bias;" in said
        assert "zero_optimization.ignore_unused_parameters" in said


@pytest.mark.parametrize(
    ("zero", "windows"),
    [
        ({"stage": 2, "ignore_unused_parameters": False, **OFFLOAD}, [FIRST, SECOND, SECOND, BOTH]),
        ({"stage": 2, "ignore_unused_parameters": True, **OFFLOAD}, [FIRST] * 4),
        ({"stage": 2, **OFFLOAD}, [FIRST] * 4),
        ({"stage": 2, "ignore_unused_parameters": False}, [FIRST] * 4),
        ({"stage": 3, "ignore_unused_parameters": False, **OFFLOAD}, [FIRST] * 4),
    ],
    ids=["within a window", "true", "default", "not offloaded", "stage 3"],
)
def test_what_trains(zero, windows):
    assert run_ranks(1, ended, zero, windows, {}) == [2]
