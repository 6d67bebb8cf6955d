"""Test the predictions of a sweep: the file that is written before the runs, and the comparison with measured times."""

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from commprof.errors import SchemaError, UsageError
from commprof.launch.sweeps import campaign as campaigns
from commprof.launch.sweeps import sweep_predictions
from commprof.launch.sweeps.config_file import ConfigFile
from commprof.launch.sweeps.points import turns
from commprof.launch.user_program import Program
from commprof.prediction.predictions import Predicted, Prediction
from commprof.trace.predictions_file import (
    PREDICTIONS_NAME,
    PredictionsFile,
    read_predictions,
    write_predictions,
)

KEY = "zero_optimization.reduce_bucket_size"
STEP = {"median": 100, "low": 90, "high": 110}
PREDICTIONS = {"settings": [{"set": {KEY: 1}, "step_ns": STEP}, {"set": {KEY: 2}, "refused": "no size"}]}
CONTENT = PredictionsFile(PREDICTIONS, "2026-11-26T16:00:00+01:00", "runs/a", "f" * 64, 2)
NOW = datetime.fromisoformat("2026-11-26T16:00:00+01:00")


def test_the_file_says_what_was_predicted_and_when(tmp_path):
    assert read_predictions(tmp_path) is None
    write_predictions(tmp_path / "s", CONTENT)
    assert read_predictions(tmp_path / "s") == CONTENT
    assert [each.name for each in (tmp_path / "s").iterdir()] == [PREDICTIONS_NAME]
    stored = json.loads((tmp_path / "s" / PREDICTIONS_NAME).read_text())
    assert stored["written"] == "2026-11-26T16:00:00+01:00" and stored["run_fingerprint"] == "f" * 64
    # The expected value is the sha256sum of the canonical JSON, computed by a different program.
    assert stored["sha256"] == "de19b6eaea17cff2ee08d55424e24220f4c3a3f3053201244f4871b5dbd5a576"


def test_an_existing_file_is_never_replaced(tmp_path):
    write_predictions(tmp_path, CONTENT)
    with pytest.raises(UsageError, match="predictions of an earlier sweep, which are not replaced"):
        write_predictions(tmp_path, CONTENT._replace(run="other"))
    with pytest.raises(UsageError, match="which are not replaced"):
        campaigns.make_room(tmp_path, force=True)
    assert read_predictions(tmp_path) == CONTENT


def test_a_changed_file_is_found_out(tmp_path):
    write_predictions(tmp_path, CONTENT)
    file = tmp_path / PREDICTIONS_NAME
    text = file.read_text()
    file.write_text(text.replace('"median": 100', '"median": 101'))
    with pytest.raises(SchemaError, match="was changed after it was written"):
        read_predictions(tmp_path)
    for other in ("", "[]", "{}", text.replace('"low": 90', '"low": "x"'), text.replace("16:00:00", "noon")):
        file.write_text(other)
        with pytest.raises(SchemaError, match="is not a file of predictions"):
            read_predictions(tmp_path)


def campaign(config, points, ranks=None):
    return campaigns.Campaign(
        program=Program("train.py", ()),
        turns=turns(points, 2),
        config=ConfigFile("--config", Path("ds.json"), config),
        argument=0,
        out=Path("s"),
        ranks=ranks,
    )


def run(config, effective=None):
    manifest = SimpleNamespace(config=config, effective_config=effective, world_size=2)
    return SimpleNamespace(path=Path("runs/a"), manifest=manifest)


def test_every_point_is_predicted_once_with_its_config(monkeypatch):
    asked = []

    def predict(source, settings, assumptions, calibration):
        asked.append((settings, assumptions.world))
        told = Predicted({KEY: 1}, 100.4, 90, 110, {}, None, 3, [], {}, 80, 95)
        return Prediction(100, 101, {}, [told, ({KEY: 2}, "no size")], 12, [])

    monkeypatch.setattr(sweep_predictions, "predict", predict)
    config = {"zero_optimization": {"stage": 2}, "deep": {}}
    points = [{KEY: 1}, {KEY: 2}]
    content = sweep_predictions.predicted_points(campaign(config, points), run(config), None, NOW)
    ((settings, world),) = asked
    assert [point for point, _ in settings] == points
    assert [each["zero_optimization"] for _, each in settings] == [
        {"stage": 2, "reduce_bucket_size": 1},
        {"stage": 2, "reduce_bucket_size": 2},
    ]
    assert (world, content.world_size, content.written) == (None, 2, "2026-11-26T16:00:00+01:00")
    first, second = content.predictions["settings"]
    assert first["step_ns"] == STEP and second == {"set": {KEY: 2}, "refused": "no size"}
    assert (
        sweep_predictions.predicted_points(campaign(config, points, 2), run(config), None, NOW).world_size
        == 2
    )
    assert (
        sweep_predictions.predicted_points(campaign(config, points, 3), run(config), None, NOW).world_size
        == 3
    )
    assert [world for _, world in asked] == [None, None, 3]


@pytest.mark.parametrize(
    ("recorded", "effective", "message"),
    [
        ({"batch": 4}, None, "ds.json has batch=8, and runs/a was recorded with 4"),
        ({}, None, "has batch=8, and runs/a was recorded with nothing"),
        ({"batch": 8, "deep": {"x": 1}}, None, "has deep.x=nothing, and runs/a was recorded with 1"),
        (None, {"batch": 4}, "has batch=8, and runs/a was recorded with 4"),
    ],
)
def test_a_run_of_another_config_predicts_nothing(recorded, effective, message):
    with pytest.raises(UsageError, match=message):
        sweep_predictions.predicted_points(
            campaign({"batch": 8}, [{KEY: 1}]), run(recorded, effective), None, NOW
        )


def result(point, number, problem=None):
    return campaigns.TurnResult(
        SimpleNamespace(number=number, point=point, repeat=0), Path(f"s/{number}"), problem
    )


def test_predicted_is_shown_beside_measured(monkeypatch):
    steps = {"s/0": (100.0, 2), "s/1": (104.0, 2), "s/2": (50.0, 2)}
    monkeypatch.setattr(sweep_predictions, "measured_step", lambda path: steps[str(path)])
    first, second = sweep_predictions.outcomes(
        CONTENT,
        [result({KEY: 1}, 0), result({KEY: 1}, 1), result({KEY: 1}, 9, "failed"), result({KEY: 2}, 2)],
    )
    assert first == sweep_predictions.Outcome("reduce_bucket_size=1", 100, 90, 110, 102.0, ())
    assert first.is_inside is True and first._replace(measured_ns=111.0).is_inside is False
    assert second == sweep_predictions.Outcome(
        "reduce_bucket_size=2", None, None, None, 50.0, ("not predicted: no size",)
    )
    assert second.is_inside is None


def test_what_was_not_measured_is_said(monkeypatch):
    def few(path):
        raise UsageError("s/0 has 2 complete steps")

    monkeypatch.setattr(sweep_predictions, "measured_step", few)
    first, second = sweep_predictions.outcomes(CONTENT, [result({KEY: 1}, 0)])
    assert first.remarks == ("not measured: s/0 has 2 complete steps",)
    assert second.remarks == ("not predicted: no size", "not measured: none of its runs succeeded")
    monkeypatch.setattr(sweep_predictions, "measured_step", lambda path: (100.0, 3))
    first, _ = sweep_predictions.outcomes(CONTENT, [result({KEY: 1}, 0)])
    assert first.remarks == ("predicted for 2 ranks, and measured with 3",)
