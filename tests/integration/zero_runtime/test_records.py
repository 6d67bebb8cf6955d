"""The records of zero_runtime, compared with an independent count below it.

They are also compared with the data that the runtime itself publishes.
"""

from __future__ import annotations

import pytest

import zero_runtime
from commprof import hooks
from commprof.trace.reader import open_run
from support.process_group_log import logged
from support.ranks import run_ranks
from support.recorded_models import make_batch, make_model

pytestmark = pytest.mark.ranks

STEPS, ACCUMULATION, MICRO_BATCH = 3, 2, 4
OPS = {"allreduce": "all_reduce", "all_gather_single": "all_gather", "all_to_all_single": "all_to_all"}
CASES = [
    (2, "all_reduce", {"stage": 0}, {}),
    (
        3,
        "reduce_to_owner",
        {"stage": 1, "use_multi_rank_bucket_allreduce": False},
        {"bf16": {"enabled": True}},
    ),
    (2, "reduce_scatter", {"stage": 2, "gradient_reduction": "reduce_scatter"}, {}),
]


def train_recorded(rank, world, directory, zero, top):
    hooks.attach(directory, quiet=True)
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"reduce_bucket_size": 20_000, **zero},
        **top,
    }
    with logged() as log:
        engine, *_ = zero_runtime.initialize(model=make_model("mlp"), config=config)
        for step in range(STEPS):
            for micro in range(ACCUMULATION):
                features, targets = make_batch("mlp", step, micro, rank)
                log.at("forward", step, micro)
                loss = engine(features.to(next(engine.module.parameters()).dtype), targets)
                log.at("backward")
                engine.backward(loss)
                log.at("optimizer")
                engine.step()
    hooks.detach()
    return log.calls


QUICK_FIRST = [
    pytest.param(case, marks=[] if case is CASES[1] else pytest.mark.long, id=case[1]) for case in CASES
]


@pytest.fixture(scope="module", params=QUICK_FIRST)
def recording(request, tmp_path_factory):
    world, name, zero, top = request.param
    directory = tmp_path_factory.mktemp("records") / name
    counted = run_ranks(world, train_recorded, str(directory), zero, top)
    return world, name, counted, open_run(directory)


def rows(run, table, rank=None):
    found = run.table(table).to_pylist()
    return [row for row in found if rank is None or row["rank"] == rank]


def test_the_records_are_the_collectives_that_were_counted(recording):
    world, _, counted, run = recording
    assert run.health.lost == run.health.unseen == 0
    for rank in range(world):
        recorded = [
            (row["step"], row["micro_step"], row["phase"], row["op"], row["peer"], row["dtype"])
            for row in rows(run, "collectives", rank)
        ]
        assert recorded == [
            (
                call.step,
                call.micro,
                call.phase,
                OPS.get(call.method, call.method),
                -1 if call.root is None else call.root,
                call.dtype,
            )
            for call in counted[rank]
        ]


def test_every_collective_says_why(recording):
    _world, name, _, run = recording
    for row in rows(run, "collectives"):
        if row["phase"] == "init":
            assert row["purpose"] == "parameter_broadcast"
        elif row["phase"] == "optimizer":
            assert row["purpose"] in ("gradient_norm", "overflow_check", "parameter_gather")
        else:
            assert row["purpose"] == "gradient_reduce" and row["bucket"] is not None
            assert row["intended_op"] == ("reduce_scatter" if name == "reduce_scatter" else None)
            assert (row["owner"] is not None) == (name == "reduce_to_owner")
            assert row["owner"] in (None, row["peer"])


def test_buckets_carry_every_gradient_once(recording):
    world, name, _, run = recording
    numel = sum(row["numel"] for row in rows(run, "parameters"))
    for rank in range(world):
        sent = [row for row in rows(run, "collectives", rank) if row["purpose"] == "gradient_reduce"]
        buckets = {(row["step"], row["bucket"]): row for row in rows(run, "buckets", rank)}
        for step in range(STEPS):
            mine = [row for (at, _), row in buckets.items() if at == step]
            passes = ACCUMULATION if name == "reduce_scatter" else 1
            assert sum(row["numel"] for row in mine) == numel * passes
            assert [row["bucket"] for row in mine] == list(range(len(mine)))
        assert {(row["step"], row["bucket"], row["bucket_bytes"]) for row in sent} == {
            (step, number, row["bytes"]) for (step, number), row in buckets.items()
        }
        assert sum(row["payload_bytes"] for row in sent) == sum(row["bytes"] for row in buckets.values())


def test_the_run_knows_its_steps_and_configuration(recording):
    _, _name, _, run = recording
    steps = [row for row in rows(run, "steps", 0) if row["step"] >= 0]
    assert [row["micro_steps"] for row in steps] == [ACCUMULATION] * STEPS
    assert [row["samples"] for row in steps] == [ACCUMULATION * MICRO_BATCH] * STEPS
