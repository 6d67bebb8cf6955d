"""The example GPT in pipeline stages, tensor shards and replicas at once trains like one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_runtime
from support import parallel_training as training
from support.standing_ranks import run_standing

PLAN = {
    "*.token": "vocabulary",
    "*.position": "split",
    "*_norm": "sequence",
    "*.qkv": "column:3",
    "*.projection": "row",
    "*.expand": "column",
    "*.contract": "row",
    "*.norm": "sequence",
    "*.head": "column",
    "loss_fn.cross_entropy": "loss",
}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(training.WORDS, training.WIDTH)
        self.position = nn.Embedding(training.CONTEXT, training.WIDTH)

    def forward(self, x):
        return self.token(x) + self.position(torch.arange(x.shape[1]))


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(training.WIDTH)
        self.head = nn.Linear(training.WIDTH, training.WORDS, bias=False)

    def forward(self, hidden):
        return self.head(self.norm(hidden)).float()


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = nn.CrossEntropyLoss()

    def forward(self, logits, y):
        return self.cross_entropy(logits.flatten(0, 1), y.flatten())


def _engine(world: int, stages: int, slices: int, sequence: bool = False):
    block = zero_runtime.LayerSpec(training.example().Block, training.WIDTH, training.HEADS)
    layers = [zero_runtime.LayerSpec(Words), *[block] * training.LAYERS, zero_runtime.LayerSpec(Logits)]
    model = zero_runtime.PipelineModule(layers, num_stages=stages, loss_fn=Loss(), seed_layers=True)
    replicas = world // stages // slices
    given = training.config(
        1,
        train_batch_size=8,
        gradient_clipping=0.3,
        tp_size=slices,
        tensor_parallel={"plan": PLAN, "sequence_parallel": sequence} if slices > 1 else {},
    )
    engine, *_ = zero_runtime.initialize(model=model, config=given)
    assert engine.parallelism.replicas == replicas and engine.gradient_accumulation_steps() == 4 // replicas
    return engine


def _step(engine, step: int) -> float:
    replicas, replica = engine.parallelism.replicas, engine.parallelism.replica
    x, y = training.batch(step, 8)
    share = slice(8 // replicas * replica, 8 // replicas * (replica + 1))
    pieces = zip(x[share].split(2), y[share].split(2), strict=True)
    return float(engine.train_batch(data_iter=iter(list(pieces))))


def _train(rank: int, world: int, stages: int, slices: int, sequence: bool = False):
    engine = _engine(world, stages, slices, sequence)
    losses = [_step(engine, step) for step in range(3)]
    sizes = sorted({tuple(parameter.shape) for parameter in engine.module.parameters()})
    return losses, float(engine.get_global_grad_norm()), sizes


@pytest.fixture(scope="module")
def alone():
    return run_standing(1, _train, 1, 1)[0]


@pytest.mark.sampled
@pytest.mark.parametrize("sequence", [False, True], ids=["columns", "sequence"])
def test_two_stages_of_two_slices(alone, sequence):
    expected, norm, _ = alone
    for losses, own, sizes in run_standing(4, _train, 2, 2, sequence):
        assert losses == pytest.approx(expected, rel=2e-5) and own == pytest.approx(norm, rel=1e-4)
        assert (24, 16) in sizes and (48, 16) not in sizes


@pytest.mark.long
@pytest.mark.parametrize("sequence", [False, True], ids=["columns", "sequence"])
def test_two_stages_of_two_slices_of_two_replicas(alone, sequence):
    expected, norm, _ = alone
    for losses, own, _ in run_standing(8, _train, 2, 2, sequence):
        assert losses == pytest.approx(expected, rel=2e-5) and own == pytest.approx(norm, rel=1e-4)


def _saved(rank: int, world: int, stages: int, slices: int, folder: str):
    engine = _engine(world, stages, slices)
    for step in range(2):
        _step(engine, step)
    engine.save_checkpoint(folder)
    return [_step(engine, step) for step in range(2, 4)]


def _loaded(rank: int, world: int, stages: int, slices: int, folder: str):
    engine = _engine(world, stages, slices)
    engine.load_checkpoint(folder)
    return [_step(engine, step) for step in range(2, 4)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, 2, 4), (1, 2, 2)), ((2, 1, 2), (2, 2, 4)), ((2, 2, 4), (1, 1, 1))]
)
def test_a_checkpoint_goes_on_in_other_stages_and_slices(tmp_path, saved, loaded):
    wanted = run_standing(saved[2], _saved, *saved[:2], str(tmp_path))[0]
    for found in run_standing(loaded[2], _loaded, *loaded[:2], str(tmp_path)):
        assert found == pytest.approx(wanted, rel=2e-5)
