"""Predictions from trainings on an H100 with NCCL, with two ranks on one card whose kernels take turns.

``h100/zero_stage2`` is zero_runtime at stage 2 with 8 layers of 1,024 times 1,024 elements, buckets of
4,000,000 elements and 40 steps.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from commprof.analysis import api
from commprof.errors import UsageError
from commprof.prediction.api import promising
from commprof.prediction.assumptions import AS_RECORDED
from commprof.prediction.predictions import predict
from commprof.prediction.recorded import recorded_steps
from commprof.trace.reader import open_run

RUNS = Path(__file__).parent / "h100"


def opened(name: str, tmp_path: Path):
    """Open a copy of a run, because commprof may store answers in the directory of a run."""
    return open_run(shutil.copytree(RUNS / name, tmp_path / "run"))


def test_the_streams_steps_are_as_long_as_the_hosts(tmp_path):
    run = opened("zero_stage2", tmp_path)
    recorded = recorded_steps(run)
    steps = run.table("steps").to_pandas()
    host = (steps["end_ns"] - steps["begin_ns"])[steps["step"].isin(recorded.numbers)].median()
    assert recorded.device == "cuda" and len(recorded.steps) == 38  # without the first two of the 40 steps
    assert np.median(recorded.step_ns) == pytest.approx(host, rel=0.01)


def test_replay_of_a_gpus_run(tmp_path):
    run = opened("zero_stage2", tmp_path)
    answer = predict(run, [({}, None)])
    assert abs(answer.replay_error) < 0.01
    (unchanged,) = answer.settings
    assert unchanged.median_ns == pytest.approx(answer.recorded_ns, rel=0.01)
    assert any("the run used cuda" in note for note in answer.notes)
    # The report computes the same exposed time with different code.
    reported = api.exposure_per_step(run).set_index("purpose")["exposed_ns"]
    assert len(answer.recorded_exposed_ns) == 3
    for purpose, ns in answer.recorded_exposed_ns.items():
        assert ns == pytest.approx(reported[purpose], rel=0.02)


def test_without_messages_a_gpus_step_is_its_compute(tmp_path):
    answer = predict(opened("zero_stage2", tmp_path), [({}, None)], AS_RECORDED._replace(comm_free=True))
    (free,) = answer.settings
    compute = answer.recorded_ns - sum(answer.recorded_exposed_ns.values())
    assert (
        free.median_ns == pytest.approx(compute, rel=0.25)
        and free.exposed_ns.keys() == answer.recorded_exposed_ns.keys()
    )


def test_messages_without_times_of_the_gpu_are_counted_and_refused(tmp_path):
    with pytest.raises(
        UsageError,
        match=r"60 of 60 messages of .* have no times on the GPU's default stream .*DistributedDataParallel",
    ):
        predict(opened("ddp_trace", tmp_path), [({}, None)])


def test_no_change_of_a_gpus_run_is_recommended(tmp_path):
    run = opened("zero_stage2", tmp_path)
    answer = promising(run.path)
    assert not answer.changes and "the run is of cuda" in answer.reason
