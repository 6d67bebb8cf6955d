"""The prediction of plan for the model that a function returns, compared with the recorded messages of real ranks."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

from commprof.cli import execute
from commprof.ledger.requests.request import parameters_of
from commprof.plan.hosts import Hosts
from commprof.plan.models import read_model
from commprof.plan.predictions import Job, predict
from commprof.plan.traffic import traffic_of
from support.recording import record

pytestmark = pytest.mark.ranks

WORLD = 2
STEPS = 4  # the messages of stage 3 repeat from the third micro-batch on
SOURCE = '''
"""A model with a tied and a frozen parameter, in a module of its own."""

from torch import nn


def make_model():
    model = nn.Sequential(nn.Embedding(11, 12), nn.Linear(12, 17), nn.LayerNorm(17), nn.Linear(17, 12), nn.Linear(12, 11))
    model[4].weight = model[0].weight
    model[3].bias.requires_grad_(False)
    return model
'''
CONFIGS = {
    **{
        f"stage {stage}": {"zero_optimization": {"stage": stage, "reduce_bucket_size": 300}}
        for stage in range(4)
    },
    "stage 3, all sharded": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "stage 1, whole norms": {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 300, "zero_force_param_types": ["LayerNorm"]}
    },
}
BASE = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "planned_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "planned_model", raising=False)
    return tmp_path


def train(rank, world, config):
    import torch
    from planned_model import make_model

    import zero_runtime

    torch.manual_seed(0)
    model = make_model()
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(STEPS):
        engine.backward(engine(torch.randint(11, (2, 3))).float().square().mean())
        engine.step()
    engine.destroy()


@pytest.mark.parametrize("name", CONFIGS)
def test_plan_predicts_the_recorded_messages_of_the_same_model(source, capsys, name):
    config = BASE | CONFIGS[name]
    run, _ = record(source / "run", WORLD, train, config)
    model = read_model("py:planned_model:make_model")
    shards = "shape", "cut", "whole_shape", "stages"
    recorded = [each._replace(**dict.fromkeys(shards)) for each in parameters_of(run.table("parameters"))]
    assert [each._replace(**dict.fromkeys(shards)) for each in model.parameters] == recorded

    issued = [
        row
        for row in run.table("collectives").to_pylist()
        if row["rank"] == 0 and row["step"] == STEPS - 1 and row["op"] != "barrier"
    ]
    wanted = Counter((row["purpose"], row["op"], row["payload_bytes"]) for row in issued)
    found = predict(config, Job(model, WORLD, WORLD, "gloo"))
    assert not found.note
    predicted: Counter[tuple[str, str, int]] = Counter()
    padding: Counter[tuple[str, str]] = Counter()
    for row in issued:
        padding[row["purpose"], row["op"]] += row["padding_bytes"] or 0
    for row in traffic_of(found.sent, Hosts(1, WORLD)):
        assert row.group_size == WORLD
        assert row.padding_bytes == padding[row.purpose, row.op]
        assert sum(size * number for size, number in row.sizes.items()) == row.payload_bytes
        predicted.update({(row.purpose, row.op, size): number for size, number in row.sizes.items()})
    assert predicted == wanted and wanted

    path = source / "ds.json"
    path.write_text(json.dumps(config))
    words = ["plan", str(path), "--model", "py:planned_model:make_model", "--world", str(WORLD)]
    assert execute([*words, "--backend", "gloo", "--json"]) == 0
    (setting,) = json.loads(capsys.readouterr().out)["settings"]
    sums: Counter[tuple[str, str]] = Counter()
    for row in issued:
        sums[row["purpose"], row["op"]] += row["payload_bytes"]
    assert {(row["purpose"], row["op"]): row["payload_bytes"] for row in setting["traffic"]} == sums
