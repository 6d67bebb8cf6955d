"""Exit codes of ``commprof verify`` on real gloo ranks: programs that die early, and groups that a script creates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command import commprof

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
import zero_runtime

config, when, step_of_death = sys.argv[sys.argv.index("--config") + 1 :][:3]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        self.dies = False

    def forward(self, x):
        if self.dies:
            raise RuntimeError("the forward pass failed")
        return self.layers(x).float().square().mean()


model = Model()
if when == "construct":
    raise RuntimeError("before the engine was made")
engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=json.load(open(config)))
if when == "init":
    raise RuntimeError("before the first step")
if when == "group":
    dist.all_reduce(torch.ones(11), group=dist.new_group([0, 1]))
for step in range(3):
    model.dies = when == "forward" and step == int(step_of_death)
    x = torch.randn(4, 32, dtype=next(model.parameters()).dtype)
    loss = engine(x)
    engine.backward(loss)
    if when == "backward" and step == int(step_of_death):
        raise RuntimeError("between backward and step")
    engine.step()
"""
BASE = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
IN_SHORT = {(0, "bf16", "forward", 0), (3, "bf16", "backward", 0)}
DEATHS = [
    pytest.param(*case, marks=[] if case in IN_SHORT else [pytest.mark.long])
    for case in (
        (stage, precision, when, step)
        for stage in (0, 1, 2, 3)
        for precision, when, step in (
            ("bf16", "forward", 0),
            ("fp32", "init", 0),
            ("bf16", "backward", 0),
            ("fp16", "backward", 1),
        )
    )
]


def recorded(place: Path, config: dict, when: str, step: int = 0) -> int:
    (place / "train.py").write_text(SCRIPT)
    (place / "ds.json").write_text(json.dumps(BASE | config))
    words = ("train.py", "--config", "ds.json", when, str(step))
    return commprof("run", "--nproc", "2", "--out", "run", *words, cwd=place).returncode


@pytest.mark.sampled
@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "precision", "when", "step"), DEATHS)
def test_a_program_that_dies_closes_as_far_as_it_came(tmp_path, stage, precision, when, step):
    config = {"zero_optimization": {"stage": stage}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    assert recorded(tmp_path, config, when, step) == 1
    done = commprof("verify", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "did not end normally" in done.stdout


@pytest.mark.ranks
@pytest.mark.long
def test_a_program_that_dies_before_its_engine_cannot_be_judged(tmp_path):
    assert recorded(tmp_path, {}, "construct") == 1
    assert commprof("verify", "run", cwd=tmp_path).returncode == 3


@pytest.mark.long
@pytest.mark.ranks
def test_a_group_that_the_script_made_cannot_be_told(tmp_path):
    assert recorded(tmp_path, {"zero_optimization": {"stage": 1}}, "group") == 0
    done = commprof("verify", "run", cwd=tmp_path)
    assert done.returncode == 3, done.stdout
    assert "a group that the script made" in " ".join(done.stdout.split())
