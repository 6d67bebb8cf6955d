"""What one rank of a large world issues on torch's fake process group, against the plan for that world.

The runtime and the recorder are the real ones; the fake group sends nothing, so values are not those of training.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from commprof.plan.hosts import Hosts
from commprof.plan.models import Model, parameters_of
from commprof.plan.predictions import Job, predict
from commprof.plan.traffic import traffic_of
from commprof.trace.finaliser import finalise
from commprof.trace.reader import open_run
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 4  # the messages of stage 3 repeat from the third micro-batch on


def make_model():
    from torch import nn

    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 64))


def config(stage):
    zero = {"stage": stage, "reduce_bucket_size": 50_000}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }


def train_on_fake_group(_rank, _world, run, stage, rank, world):
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import commprof
    import zero_runtime

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE="8")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    commprof.attach(run)
    model = make_model()
    engine, *_ = zero_runtime.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage)
    )
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()
    commprof.detach()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("stage", "rank", "world"),
    [
        *((stage, 0, 1024) for stage in range(4)),
        *(
            pytest.param(stage, rank, world, marks=pytest.mark.long)
            for stage in range(4)
            for rank, world in ((1023, 1024), (0, 16384), (16383, 16384))
        ),
    ],
)
def test_one_rank_of_a_large_world_issues_what_plan_predicts(tmp_path, stage, rank, world):
    run: Path = tmp_path / "run"
    run_ranks(1, train_on_fake_group, str(run), stage, rank, world, process_group=False)
    finalise(run)
    issued = Counter(
        (row["purpose"], row["op"], row["payload_bytes"])
        for row in open_run(run).table("collectives").to_pylist()
        if row["step"] == STEPS - 1 and row["op"] != "barrier"
    )
    job = Job(Model(parameters_of(make_model()), None, ""), world, 8)
    predicted: Counter[tuple[str, str, int]] = Counter()
    for row in traffic_of(predict(config(stage), job).sent, Hosts(world // 8, 8)):
        predicted.update({(row.purpose, row.op, size): number for size, number in row.sizes.items()})
    assert predicted == issued and issued
