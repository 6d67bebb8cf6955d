"""A small training for tests of checkpoints, whose results depend on everything that a checkpoint stores."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

import zero_runtime
from zero_runtime.checkpoint.files.checkpoint_reader import Checkpoint

FEATURES, WIDTH = 7, 13
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 7},
}


class Odd(nn.Module):
    """A model with unusual state.

    The model has tied, frozen, unused, empty and transposed parameters, a buffer that differs on every rank,
    dropout, and extra state.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.second.weight
        self.turned = nn.Parameter(torch.randn(5, WIDTH).t() / 4)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.randn(17))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, features, targets):
        self.calls += 1
        with torch.no_grad():
            self.seen += features.float().mean()
        hidden = self.dropout(torch.tanh(self.frozen(self.first(features))))
        hidden = self.tied(torch.tanh(self.second(hidden))) + self.seen.tanh().mean().to(hidden.dtype)
        return ((hidden @ self.turned).float() - targets).square().mean()

    def get_extra_state(self):
        return {"calls": self.calls, "shape": (FEATURES, WIDTH)}

    def set_extra_state(self, state):
        assert state["shape"] == (FEATURES, WIDTH)
        self.calls = state["calls"]


def make_engine(stage, precision="fp32", optimizer="AdamW", schedule=True, dropout=0.0, **more):
    """Return an engine for ``Odd`` with two param groups. The initial weights are equal in every process."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = Odd(dropout)
    torch.set_rng_state(generator_state)
    trainable = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trainable if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in trainable if each.dim() <= 1], "weight_decay": 0.0, "lr": 0.03},
    ]
    rate = {"lr": 0.01, **({"momentum": 0.9} if optimizer == "SGD" else {}), **more.pop("params", {})}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "optimizer": {"type": optimizer, "params": rate},
        "zero_optimization": {"stage": stage, **more.pop("zero", {})},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **({"scheduler": SCHEDULE} if schedule else {}),
        **more,
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=groups, config=config)
    return engine


def train(engine, rank, first, steps, precision="fp32"):
    """Train for ``steps`` steps from step ``first``, and return the losses of all micro-batches.

    The data depend only on the step, the micro-batch and the rank.
    """
    losses = []
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
            features = torch.randn(4, FEATURES, generator=generator).to(DTYPES[precision])
            loss = engine(features, torch.randn(4, 5, generator=generator))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def everything_in(directory: Path):
    """Return every complete tensor and every scalar of a checkpoint by name.

    The result does not depend on how the checkpoint partitions the tensors.
    """
    checkpoint = Checkpoint(directory)
    tensors = {}
    for name, facts in checkpoint.parameters.items():
        numel = math.prod(facts.shape)
        tensors[name] = torch.full((numel,), math.nan)
        checkpoint.read_value(name, 0, tensors[name])
        for state in checkpoint.state_dtypes(name):
            tensors[name, state] = torch.full((numel,), math.nan)
            checkpoint.read_state(state, name, 0, tensors[name, state])
        tensors[name, "scalars"] = dict(checkpoint.scalars(name))
    for name in checkpoint.manifest.buffers:
        tensors[name] = checkpoint.buffer(name, 0)
    return tensors


def differences(first, second):
    """Return the sorted names whose values are not exactly equal in two results of ``everything_in``."""
    return sorted(
        str(name)
        for name in first.keys() | second.keys()
        if name not in first or name not in second or not _equal(first[name], second[name])
    )


def _equal(first, second):
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
