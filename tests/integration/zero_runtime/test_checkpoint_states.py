"""Optimizer states of kinds that torch does not have: a tensor of one element, a number, and a tensor per element."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_runtime
from support.standing_ranks import run_standing

pytestmark = pytest.mark.ranks
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
}


class Counting(torch.optim.Optimizer):
    """SGD with momentum that counts its steps in two ways, and slows down as the count grows."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"whole_steps": 0, "tensor_steps": torch.zeros(1)}
                    state["mean"] = torch.zeros_like(parameter)
                state["whole_steps"] += 1
                state["tensor_steps"] += 1
                state["mean"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(state["mean"] * group["lr"] / state["tensor_steps"])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.linear = nn.Linear(3, 5)
        self.gain = nn.Parameter(torch.ones(1))  # its state has as many elements as the step count

    def forward(self, inputs):
        return (self.linear(inputs) * self.gain).square().mean()


def engine_at(stage):
    model = Scaled()
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    return zero_runtime.initialize(model=model, optimizer=Counting(model.parameters()), config=config)[0]


def train(engine, rank, first):
    losses = []
    for step in range(first, first + 3):
        inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(inputs)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def resumed(rank, world, root):
    found = {}
    for stage in (0, 2, 3):
        engine = engine_at(stage)
        train(engine, rank, 0)
        engine.save_checkpoint(f"{root}/{stage}")
        found[stage, "on"] = train(engine, rank, 3)
    for saved in (0, 2, 3):
        for stage in (0, 1, 3):
            engine = engine_at(stage)
            engine.load_checkpoint(f"{root}/{saved}")
            found[saved, stage] = train(engine, rank, 3)
            counts = [state["tensor_steps"] for state in engine.optimizer.state.values()]
            assert all(torch.equal(each, torch.full((1,), 6.0)) for each in counts), counts
    return found


def test_a_state_of_one_element_goes_from_any_stage_to_any_other(tmp_path):
    for found in run_standing(2, resumed, str(tmp_path)):
        for (saved, stage), losses in found.items():
            assert losses == pytest.approx(found[saved, "on"], rel=1e-5), (saved, stage)


def _adam_after_adamw(rank, world, directory):
    """Return the weight decay of an engine with Adam that has loaded a checkpoint of an engine with AdamW."""
    engines = []
    for decoupled in (True, False):
        model = Scaled()
        params = {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": decoupled}
        config = {
            **CONFIG,
            "optimizer": {"type": "Adam", "params": params},
            "zero_optimization": {"stage": 1},
        }
        engines.append(
            zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        )
    saved, loaded = engines
    train(saved, rank, 0)
    saved.save_checkpoint(directory)
    loaded.load_checkpoint(directory)
    (group,) = loaded.optimizer.param_groups
    return group["decoupled_weight_decay"]


def test_adam_that_loads_the_state_of_adamw_stays_adam(tmp_path):
    assert run_standing(1, _adam_after_adamw, tmp_path) == [False]
