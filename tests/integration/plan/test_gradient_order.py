"""The order of gradients in the traced pass of plan.

The buckets must equal those of real ranks, whatever order the model has.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from commprof.plan.models import Model, parameters_of
from commprof.plan.predictions import Job, predict
from support.recording import record

pytestmark = pytest.mark.ranks

WORLD, STEPS, WIDTH = 2, 4, 16
SHAPE = (2, 5, WIDTH)


class Norms(nn.Module):
    """Norms and linear layers, whose gradients become ready in different orders.

    The gradient of a norm's weight is ready before that of its bias. For a linear layer, the gradient of the
    bias is ready first.
    """

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 48), nn.LayerNorm(48)
        self.down, self.last = nn.Linear(48, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.last(self.down(self.norm(self.up(x)).relu())).square().mean()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Norms() for _ in range(2))

    def forward(self, x):
        return sum(checkpoint(block, x, use_reentrant=False) for block in self.blocks)


class Scrambled(nn.Module):
    """Modules that are created in a different order than they run in.

    One module never runs, and one runs twice.
    """

    def __init__(self):
        super().__init__()
        self.last, self.unused, self.first = nn.Linear(40, WIDTH), nn.Linear(7, 9), nn.Linear(WIDTH, 24)
        self.middle, self.twice = nn.Linear(24, 40), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x):
        x = self.twice(self.twice(x).relu())
        return self.last(self.middle(self.first(x).relu() * self.scale).relu()).square().mean()


class Projection(nn.Module):
    """A projection that torch does not treat as a linear layer, so that stage 3 does not replace it.

    Even at stage 3 the gradient of its bias is ready first.
    """

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, width) * 0.02)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).unflatten(0, x.shape[:2])


class Attention(nn.Module):
    """Attention with one input, from which stage 3 makes three inputs.

    torch then projects them one at a time.
    """

    def __init__(self):
        super().__init__()
        self.projection, self.out = Projection(48), nn.Linear(48, WIDTH)
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.out(self.projection(x))
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0]).square().mean()


MODELS = (Norms, Checkpointed, Scrambled, Attention)


def train(rank, world, model, config):
    import zero_runtime

    torch.manual_seed(0)
    trained = model()
    engine, *_ = zero_runtime.initialize(model=trained, model_parameters=trained.parameters(), config=config)
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(SHAPE)))
        engine.step()
    engine.destroy()


@pytest.mark.sampled("Norms-2", "Attention-3")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("model", MODELS, ids=[each.__name__ for each in MODELS])
def test_a_traced_pass_shows_how_gradients_fill_the_buckets(tmp_path, model, stage):
    """A traced pass shows how gradients fill the buckets.

    Rows of a model with norms were marked ``about``, and their messages differed from the run.
    """
    config = {
        "train_micro_batch_size_per_gpu": SHAPE[0],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0,
        },
    }  # fmt: skip
    run, _ = record(tmp_path / "run", WORLD, train, model, config)
    issued = Counter(
        (row["purpose"], row["op"], row["payload_bytes"])
        for row in run.table("collectives").to_pylist()
        if row["rank"] == 0 and row["step"] == STEPS - 1 and row["op"] != "barrier"
    )

    def build(micro_batch, sequence):
        with torch.device("meta"):
            return model(), torch.empty(SHAPE, device="meta")

    planned = predict(
        config, Job(Model(parameters_of(build(0, None)[0]), None, "", build), WORLD, WORLD, "gloo")
    )
    assert not planned.note and all(each.exact and each.bytes_exact for each in planned.sent)
    messages = Counter(
        (each.purpose, each.issued_op, sum(sizes) if len(sizes) > 1 else sizes[0])
        for each in planned.sent
        for sizes in each.payloads
    )
    assert messages == issued and issued
