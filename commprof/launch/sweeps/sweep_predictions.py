"""The predictions of a sweep, which are made from a recorded run and compared with the measured step times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from commprof.calibration.results import Calibration
from commprof.errors import CommprofError, UsageError
from commprof.launch.sweeps.campaign import Campaign, TurnResult
from commprof.launch.sweeps.points import derive, label, mismatches
from commprof.prediction.assumptions import Assumptions
from commprof.prediction.prediction_json import prediction_json
from commprof.prediction.predictions import predict
from commprof.prediction.recorded import recorded_steps
from commprof.trace.fingerprint import fingerprint
from commprof.trace.predictions_file import PredictionsFile
from commprof.trace.reader import Run, open_run


class Outcome(NamedTuple):
    """The predicted and the measured step time of one point of a sweep.

    Times are in ns per step: the mean over the ranks, then the median over the steps.

    Attributes:
        setting: The point as text.
        predicted_ns, low_ns, high_ns: The predicted time and its interval, or None if the point was not predicted.
        measured_ns: The median over the runs of the point, or None if no run can be evaluated.
        remarks: The reasons for missing values, and remarks about the other values.
    """

    setting: str
    predicted_ns: float | None
    low_ns: float | None
    high_ns: float | None
    measured_ns: float | None
    remarks: tuple[str, ...]

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured step time is in the predicted interval, or None if a value is missing."""
        if self.low_ns is None or self.high_ns is None or self.measured_ns is None:
            return None
        return self.low_ns <= self.measured_ns <= self.high_ns


def predicted_points(
    campaign: Campaign, run: Run, calibration: Calibration | None, now: datetime
) -> PredictionsFile:
    """Predict every point of ``campaign`` from ``run``.

    Args:
        campaign: The sweep.
        run: The recorded run.
        calibration: The calibration of the run's hosts, for messages that the run does not contain.
        now: The current time with its UTC offset.

    Raises:
        UsageError: the run was recorded with another config, cannot be replayed, or no point can be predicted.
    """
    config = campaign.config.content or {}
    points = [turn.point for turn in campaign.turns if not turn.repeat]
    _check_config(config, points, run, str(campaign.config.path))
    recorded_world = run.manifest.world_size or run.health.ranks_expected or 0
    world = campaign.ranks if campaign.ranks not in (None, recorded_world) else None
    answer = predict(
        run, [(point, derive(config, point)) for point in points], Assumptions(world=world), calibration
    )
    return PredictionsFile(
        prediction_json(answer),
        now.isoformat(timespec="seconds"),
        str(run.path),
        fingerprint(run.path).key,
        world or recorded_world,
    )


def _check_config(
    config: Mapping[str, Any], points: Sequence[Mapping[str, Any]], run: Run, name: str
) -> None:
    """Raise UsageError if ``config`` differs from the config of ``run`` in keys that ``points`` does not set.

    The prediction would ignore such a difference.
    """
    swept = set(points[0])
    here = dict(_leaves(config, ""))
    recorded = run.manifest.config
    if recorded is None:
        engine = run.manifest.effective_config or {}
        others = [each.key for each in mismatches(here, engine)]
        there = dict(_leaves(engine, ""))
    else:
        there = dict(_leaves(recorded, ""))
        others = [key for key in {**here, **there} if key not in here or key not in there]
        others += [each.key for each in mismatches(here, recorded)]
    other = next((key for key in others if key not in swept), None)
    if other is not None:
        raise UsageError(
            f"{name} has {other}={_value(here, other)}, and {run.path} was recorded with {_value(there, other)}, so its "
            "steps do not predict this sweep. Record a run with this config, or sweep the config of that run"
        )


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key], default=str) if key in leaves else "nothing"


def outcomes(content: PredictionsFile, results: Sequence[TurnResult]) -> list[Outcome]:
    """Return each predicted point of ``content`` with the step time that the runs of ``results`` measured."""
    return [
        _outcome(setting, [each for each in results if each.turn.point == setting["set"]], content.world_size)
        for setting in content.predictions["settings"]
    ]


def _outcome(setting: Mapping[str, Any], results: Sequence[TurnResult], world: int) -> Outcome:
    remarks = [f"not predicted: {setting['refused']}"] if "refused" in setting else []
    measured: list[float] = []
    for result in results:
        if result.problem is not None:
            continue  # reported when it failed
        try:
            step_ns, ranks = measured_step(result.run)
        except CommprofError as problem:
            remarks.append(f"not measured: {problem}")
            continue
        if ranks != world:
            remarks.append(f"predicted for {world} ranks, and measured with {ranks}")
        measured.append(step_ns)
    if not measured and len(remarks) == ("refused" in setting):
        remarks.append("not measured: none of its runs succeeded")
    step = setting.get("step_ns", {})
    return Outcome(
        label(setting["set"]),
        step.get("median"),
        step.get("low"),
        step.get("high"),
        float(np.median(measured)) if measured else None,
        tuple(dict.fromkeys(remarks)),
    )


def measured_step(path: Path) -> tuple[float, int]:
    """Return the median step time of the run at ``path`` in ns, and the number of ranks.

    The step time has the same definition as in predictions.

    Raises:
        UsageError, TraceError: the run has too few equal steps, or cannot be read.
    """
    recorded = recorded_steps(open_run(path))
    return float(np.median(recorded.step_ns)), recorded.world_size
