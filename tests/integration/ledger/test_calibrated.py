"""``commprof verify`` of runs whose messages go along the axes of a grid where the measured costs favor this."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest

from commprof.ledger.verification import verify
from support.changed_runs import Changed
from support.recording import record

pytestmark = pytest.mark.ranks

OPS = {
    "all_reduce": 1.5,
    "reduce_scatter": 0.75,
    "all_gather": 0.75,
    "all_to_all": 0.75,
}  # bus factors of 4 ranks
CASES = {
    "buckets": (2, {"stage": 2, "reduce_scatter": False}),
    "chunks": (2, {"stage": 2, "gradient_reduction": "reduce_scatter"}),
    "slices": (4, {"stage": 3, "stage3_param_persistence_threshold": 0}),
}
QUICK = "buckets"


def calibrations(folder):
    """Write calibration files with which only small messages go among all ranks at once.

    In the file of all ranks the bandwidth is low. In the files of the axes the latency is high.
    """
    paths = []
    for name, alpha_ns, bytes_per_s in (
        ("world", 1e3, 1e8),
        ("between", 1e4, 1e10),
        ("inside", 1e4, 1e10),
    ):
        fit = {"alpha_ns": alpha_ns, "beta_bytes_per_s": bytes_per_s}
        ops = {op: {"bus_factor": factor, "sizes": [], "fit": fit} for op, factor in OPS.items()}
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"format": "commprof-calibration", "schema_version": 1, "ops": ops}))
        paths.append(str(path))
    return {"world": paths[0], "axes": paths[1:]}


def train(rank, world, zero, files, steps, always=None):
    """Train a small model.

    ``always`` overrides the costs: True sends every message along the axes, and False sends none along the
    axes.
    """
    import torch

    import zero_runtime
    from zero_runtime.experimental.topology_aware.composition_choice import Choice

    if always is not None:
        Choice._composes = lambda self, operation, payload: always
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 70), torch.nn.ReLU(), torch.nn.Linear(70, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"reduce_bucket_size": 900, **zero},
        "communication": {"topology": [2, 2], "calibration": files},
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(steps):
        engine.backward(engine(torch.randn(2, 33)).square().mean())
        engine.step()
    engine.destroy()


@functools.cache
def recorded(name, always=None):
    folder = Path(tempfile.mkdtemp())
    steps, zero = CASES[name]
    files = calibrations(folder)
    run, _ = record(folder / "run", 4, train, zero, files, steps, always)
    for path in (files["world"], *files["axes"]):  # a run can be verified on a machine without these files
        Path(path).unlink()
    return run


def ways(run, purpose="gradient_reduce"):
    """Return the ways that messages took: True if a message went among all ranks, False if one went along an axis."""
    rows = run.table("collectives").to_pylist()
    return {row["group_size"] == 4 for row in rows if row["purpose"] == purpose and row["step"] == 1}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.long) for name in CASES]
)
def test_every_byte_is_explained(name):
    run = recorded(name)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict.sentences
    assert name != QUICK or ways(run) == {True, False}


@pytest.mark.parametrize(
    ("name", "always"),
    [
        (QUICK, True),
        pytest.param(QUICK, False, marks=pytest.mark.long),
        pytest.param(
            "chunks", False, marks=pytest.mark.long
        ),  # chunks are so large that all of them go along the axes
        pytest.param("slices", True, marks=pytest.mark.long),
    ],
)
def test_a_run_that_goes_other_ways_than_the_costs_say_is_named(name, always):
    verdict = verify(recorded(name, always))
    assert str(verdict.state) == "mismatch"
    assert {each.purpose for each in verdict.unexplained} <= {"gradient_reduce", "parameter_gather"}


def test_a_longer_message_is_named():
    def longer(row):
        changed = row["purpose"] == "gradient_reduce" and row["group_size"] == 4 and row["step"] == 1
        return [row | {"payload_bytes": row["payload_bytes"] + 4}] if changed else [row]

    verdict = verify(Changed(recorded(QUICK), longer))
    assert str(verdict.state) == "mismatch"
    assert {(each.purpose, each.steps) for each in verdict.unexplained} == {("gradient_reduce", "1")}
