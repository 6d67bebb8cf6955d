"""Checkpoints of pipelines: they go on exactly, with the same stages or others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_runtime
from support.ranks import run_ranks
from zero_runtime.checkpoint.consolidation import consolidated_state_dict

pytestmark = pytest.mark.ranks
WIDTH, MICRO_BATCHES = 8, 2


class Normed(nn.Module):
    """A layer with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, values):
        return self.norm(torch.tanh(self.linear(values)))


def engine_of(stages, stage=1, tied=False, **keys):
    layers = [zero_runtime.LayerSpec(Normed) for _ in range(4)]
    if tied:
        ends = zero_runtime.TiedLayerSpec(
            "ends", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"]
        )
        layers = [ends, *layers, ends]
    model = zero_runtime.PipelineModule(
        [*layers, zero_runtime.LayerSpec(nn.Linear, WIDTH, 1)],
        num_stages=stages,
        loss_fn=lambda outputs, targets: (outputs - targets).square().mean(),
        seed_layers=True,
        seed_fn=torch.manual_seed,
        partition_method="uniform",
    )
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
        "zero_optimization": {"stage": stage},
        **keys,
    }
    return zero_runtime.initialize(model=model, config=given)[0]


def train(engine, steps):
    replica = engine.parallelism.replica
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + replica)
        features = torch.randn(MICRO_BATCHES * 4, WIDTH, generator=generator)
        found.append(float(engine.train_batch(data=features, targets=features.sum(1, keepdim=True))))
    return found


def _save(rank, world, directory, stages, stage, tied):
    engine = engine_of(stages, stage, tied)
    train(engine, range(3))
    engine.save_checkpoint(directory, client_state={"told": 7})
    return train(engine, range(3, 5))


def _load(rank, world, directory, stages, stage, tied):
    engine = engine_of(stages, stage, tied)
    train(engine, range(7, 8))
    path, told = engine.load_checkpoint(directory)
    assert path.endswith("global_step3") and told == {"told": 7} and engine.global_steps == 3
    return train(engine, range(3, 5))


@pytest.mark.parametrize(
    ("saved", "loaded", "tied"),
    [
        ((2, 1), (2, 1), False),
        ((2, 1), (3, 0), True),
        ((3, 0), (2, 1), True),
        ((1, 0), (2, 1), True),
        ((2, 0), (1, 1), True),
    ],
    ids=str,
)
def test_training_goes_on_with_any_number_of_stages(tmp_path, saved, loaded, tied):
    wanted = run_ranks(saved[0], _save, tmp_path, *saved, tied)
    found = run_ranks(loaded[0], _load, tmp_path, *loaded, tied)
    assert all(each == pytest.approx(wanted[0], rel=1e-5) for each in (*wanted, *found))


def test_replicas_and_stages(tmp_path):
    wanted = run_ranks(4, _save, tmp_path, 2, 1, True)
    found = run_ranks(4, _load, tmp_path, 4, 0, True)
    # Without replicas a step has half the samples: it is the first loss after loading that must agree.
    assert all(len(each) == 2 for each in found)
    again = run_ranks(4, _load, tmp_path, 2, 0, True)
    assert all(each == pytest.approx(wanted[0], rel=1e-5) for each in again)


def _weights(rank, world, directory):
    engine = engine_of(2, tied=True)
    train(engine, range(2))
    engine.save_checkpoint(directory, tag="here")
    with pytest.raises(zero_runtime.UnsupportedError, match=r"python -m zero_runtime\.checkpoint"):
        engine.save_16bit_model(directory)
    return {name: value.tolist() for name, value in engine.module.state_dict().items()}


def test_one_state_dict_of_all_stages(tmp_path):
    mine = run_ranks(2, _weights, tmp_path)
    whole = consolidated_state_dict(tmp_path, "here")
    assert set(whole) == {name for each in mine for name in each}
    for values in mine:
        for name, value in values.items():
            torch.testing.assert_close(whole[name], torch.tensor(value).to(whole[name].dtype))


def _load_state_dict(rank, world, directory):
    engine = engine_of(2, tied=True)
    whole = consolidated_state_dict(directory, "here")
    engine.load_module_state_dict(whole)
    for name, value in engine.module.state_dict().items():
        torch.testing.assert_close(value, whole[name].to(value.dtype))


def test_a_state_dict_of_all_stages_is_loaded(tmp_path):
    run_ranks(2, _weights, tmp_path)
    run_ranks(2, _load_state_dict, tmp_path)


def _other_model(rank, world, directory):
    engine = engine_of(1)
    with pytest.raises(zero_runtime.errors.CheckpointError, match="another model: it lacks '0"):
        engine.load_checkpoint(directory)


def test_another_model_is_refused(tmp_path):
    run_ranks(2, _save, tmp_path, 2, 0, True)
    run_ranks(1, _other_model, tmp_path)
