"""Test how a recorded run narrows the bounds of a planned step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commprof.analysis import api
from commprof.errors import UsageError
from commprof.plan.api import Question, compare, make_plan
from commprof.plan.durations import StepTime, narrowed
from commprof.plan.recorded_steps import RecordedStep, recorded_job, recorded_step
from commprof.trace.reader import open_run

RUNS = Path(__file__).resolve().parents[3] / "golden" / "h100"
BOUNDS = StepTime(60, 0, 40, 120, 160, [])


def run(least, most):
    return RecordedStep(Path("run"), 100, least, most, ("gradient_reduce",))


@pytest.mark.parametrize(
    ("least", "most", "ends"),
    [(0.25, 0.5, (140, 150)), (0.5, 0.5, (140, 140)), (0.0, 1.0, (120, 160)), (0.0, 0.0, (160, 160))],
)
def test_the_recorded_part_of_what_can_overlap_does(least, most, ends):
    assert narrowed(BOUNDS, run(least, most))[3:5] == ends


def test_a_step_is_never_shorter_than_all_that_can_overlap_allows():
    # Computation is shorter than the communication that it could overlap. The bounds contain this limit, but
    # the overlapped part of the run does not.
    assert narrowed(BOUNDS._replace(least_ns=150), run(1.0, 1.0))[3:5] == (150, 150)


def test_without_a_time_of_computation_nothing_is_narrowed():
    bounds = BOUNDS._replace(least_ns=None, most_ns=None)
    assert narrowed(bounds, run(0.5, 0.5)) is bounds


def test_a_recorded_run_tells_its_computation(tmp_path):
    path = Path(shutil.copytree(RUNS / "zero_stage2", tmp_path / "run"))
    told = recorded_step(open_run(path))
    steps = open_run(path).table("steps").to_pandas()
    step = (steps["end_ns"] - steps["begin_ns"])[steps["step"] > 0].median()
    assert 0.1 * step < told.compute_ns < 0.3 * step  # Of 48 ms, 41 ms are exposed.
    # Gradients and norms block. For gathers, the end is not always known.
    assert told.least_hidden <= told.most_hidden < 0.2 and told.purposes == ("parameter_gather",)


def test_a_run_without_exposed_times_is_refused(tmp_path):
    path = Path(shutil.copytree(RUNS / "ddp_trace", tmp_path / "run"))
    with pytest.raises(UsageError, match="exposed communication of a step is not known"):
        recorded_step(open_run(path))


def test_the_plan_takes_computation_and_overlap_from_the_run():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000, "overlap_comm": True},
    }
    question = Question(config, "params:1e8", 8, links="intra=10GB/s,inter=10GB/s", step_compute="1s")
    (wide,) = compare(make_plan(question))
    told = RecordedStep(Path("run"), 1_000_000_000, 0.4, 0.6, ("gradient_reduce",))
    (narrow,) = compare(make_plan(question._replace(step_compute=None, recorded=told)))
    assert wide.timed.least_ns < narrow.timed.least_ns < narrow.timed.most_ns < wide.timed.most_ns
    assert narrow.timed.most_ns == pytest.approx(wide.timed.most_ns - 0.4 * wide.timed.overlapping_ns, abs=1)
    with pytest.raises(UsageError, match="--step-compute is 1s and --recorded run; give one of them"):
        make_plan(question._replace(recorded=told))


@pytest.mark.long
@pytest.mark.parametrize("run", ["ddp_trace", "deepspeed_stage2", "zero_stage2"])
def test_what_pages_ask_about_a_run_is_what_its_overview_says(run, tmp_path):
    path = shutil.copytree(RUNS / run, tmp_path / "run")
    facts = api.overview(path)
    assert api.backends(path) == facts["backends"]
    assert list(recorded_job(open_run(path)).host_names) == facts["hosts"]
    assert (api.health(path).records, api.health(path).summed) == (facts["records"], facts["summed"])
    union = api.exposure_per_step(path).iloc[-1:]
    assert api.has_exposed_times(path) == bool(union["exposed_ns"].notna().any())
