"""The master weights and optimizer states of a plan, compared with the fp32 tensors of real ranks.

The model has a frozen layer.
"""

from __future__ import annotations

import gc

import pytest

from commprof.plan.models import Model, parameters_of
from commprof.plan.predictions import Job, predict
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WORLD = 2
COUNTERS = 32  # the bytes of step counters and norms, which a plan omits


def make_model():
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 64))
    model[1].requires_grad_(False)
    return model


def config(stage):
    zero = {"stage": stage, "reduce_bucket_size": 1000}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }


def wide_storages():
    """Return the bytes of the storages of all dense fp32 tensors, by address."""
    import torch

    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = [
        each.untyped_storage()
        for each in tensors
        if each.dtype == torch.float32 and each.layout == torch.strided
    ]
    return {each.data_ptr(): each.nbytes() for each in storages}


def wide_bytes(rank, world, stage):
    """Return the bytes of the fp32 tensors that remain after two steps in bf16."""
    import torch

    import zero_runtime

    before = wide_storages()  # the rank is a fork, and contains tensors of earlier tests
    model = make_model()
    engine, *_ = zero_runtime.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage)
    )
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 64, dtype=torch.bfloat16)).square().mean())
        engine.step()
    return sum(size for address, size in wide_storages().items() if address not in before)


@pytest.mark.parametrize("stage", range(4))
def test_a_rank_keeps_the_states_that_plan_counts(stage):
    measured = run_ranks(WORLD, wide_bytes, stage)[0]
    model = Model(parameters_of(make_model()), None, "")
    held = {
        each.what: each.device for each in predict(config(stage), Job(model, WORLD, WORLD, "gloo")).memory
    }
    assert 0 <= measured - held["masters"] - held["optimizer states"] <= COUNTERS
