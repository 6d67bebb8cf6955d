"""Test that the predictions of a sweep are read for each run of the sweep."""

import pytest

from commprof.analysis import api
from commprof.analysis.compare import predicted_steps as module
from commprof.trace.predictions_file import PREDICTIONS_NAME, PredictionsFile, write_predictions
from support.runs import SyntheticRun

STEP = {"median": 100, "low": 90, "high": 110}
SETTINGS = [{"set": {"a": 1}, "step_ns": STEP}, {"set": {"a": 2}, "refused": "no size"}]


class Manifest:
    def __init__(self, sweep):
        self.sweep = sweep


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ({"point": {"a": 1}}, api.PredictedStep(100, 90, 110)),
        ({"point": {"a": 2}}, None),
        ({"point": {"a": 3}}, None),
        (None, None),
    ],
)
def test_each_run_has_the_prediction_of_its_point(tmp_path, monkeypatch, sweep, expected):
    monkeypatch.setattr(module, "read_manifest", lambda run: Manifest(sweep))
    assert api.predicted_steps([tmp_path / "r"]) == [None]
    content = PredictionsFile({"settings": SETTINGS}, "2026-11-26T16:00:00+01:00", "runs/a", "f" * 64, 2)
    write_predictions(tmp_path, content)
    assert api.predicted_steps([tmp_path / "r"]) == [expected]
    file = tmp_path / PREDICTIONS_NAME
    file.write_text(file.read_text().replace("100", "101"))
    assert api.predicted_steps([tmp_path / "r"]) == [None]


def test_what_a_sweep_predicted_and_did_not_run_is_listed_by_the_keys_that_differ(tmp_path):
    bucket, scatter = "zero_optimization.reduce_bucket_size", "zero_optimization.reduce_scatter"
    points = [{bucket: size, scatter: True} for size in (1000, 2000, 3000)]
    settings = [{"set": point, "step_ns": STEP} for point in points]
    settings.append({"set": {bucket: 4000, scatter: True}, "refused": "no size"})
    content = PredictionsFile({"settings": settings}, "2026-11-26T16:00:00+01:00", "runs/a", "f" * 64, 2)
    write_predictions(tmp_path, content)
    for number, point in enumerate(points[:2]):
        SyntheticRun(1, sweep={"name": "s", "point": point, "repeat": 0}).write(tmp_path / f"run-{number}")
    SyntheticRun(1).write(tmp_path / "other")
    step = api.PredictedStep(100, 90, 110)
    assert api.unrun_settings([tmp_path / "run-0"]) == [("reduce_bucket_size=3000", step)]
    assert api.unrun_settings([tmp_path / "other"]) == [], "a run of no sweep says nothing of one"
    SyntheticRun(1, sweep={"name": "s", "point": points[2], "repeat": 0}).write(tmp_path / "run-2")
    assert api.unrun_settings([tmp_path / "run-0", tmp_path / "run-1"]) == []
