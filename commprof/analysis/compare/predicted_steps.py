"""Step times that ``commprof sweep --predict`` predicted for the runs in its directory before it ran them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commprof.analysis.compare.settings import flatten, short_names, value_text
from commprof.errors import CommprofError
from commprof.trace.directory import MANIFEST_NAME
from commprof.trace.manifest import read_manifest
from commprof.trace.predictions_file import read_predictions


class PredictedStep(NamedTuple):
    """A predicted step time in ns, as the mean over ranks, with its 80 % interval."""

    median_ns: float
    low_ns: float
    high_ns: float


class UnrunSetting(NamedTuple):
    """A setting that a sweep predicted and that none of the runs of the sweep has.

    ``label`` names the values of the keys that differ in the sweep.
    """

    label: str
    step: PredictedStep


def predicted_steps(runs: Sequence[Path]) -> list[PredictedStep | None]:
    """Return the prediction of each run, or None for a run without a prediction.

    A run has no prediction if it does not belong to a sweep with ``--predict``, if the prediction was refused, or if
    the file of predictions was changed.
    """
    return [_predicted_step(Path(run)) for run in runs]


def _predicted_step(run: Path) -> PredictedStep | None:
    point = _point(run)
    return next((step for setting, step in _predicted(run.parent) if setting == point), None)


def unrun_settings(runs: Sequence[Path]) -> list[UnrunSetting]:
    """Return the settings that the sweeps of ``runs`` predicted but did not run.

    There are such settings if a sweep was stopped or is still running.
    """
    swept = dict.fromkeys(Path(run).parent for run in runs if _point(Path(run)) is not None)
    return [each for directory in swept for each in _unrun(directory)]


def _unrun(directory: Path) -> list[UnrunSetting]:
    predicted = _predicted(directory)
    points = (
        [_point(manifest.parent) for manifest in directory.glob(f"*/{MANIFEST_NAME}")] if predicted else []
    )
    values = [{key: value_text(value) for key, value in flatten(setting).items()} for setting, _ in predicted]
    keys = dict.fromkeys(key for each in values for key in each)
    short = short_names(keys, keys)
    differing = [key for key in keys if len({each.get(key) for each in values}) > 1] or list(keys)
    return [
        UnrunSetting(", ".join(f"{short[key]}={texts[key]}" for key in differing if key in texts), step)
        for (setting, step), texts in zip(predicted, values, strict=True)
        if setting not in points
    ]


def _point(run: Path) -> Any | None:
    """Return the sweep point of ``run``, or None if the run does not belong to a sweep."""
    try:
        return (read_manifest(run).sweep or {}).get("point")
    except CommprofError:
        return None


def _predicted(directory: Path) -> list[tuple[dict[str, Any], PredictedStep]]:
    """Return the settings of the sweep in ``directory`` that have a predicted step, with their steps."""
    try:
        content = read_predictions(directory)
    except CommprofError:
        return []
    return [
        (
            dict(setting["set"]),
            PredictedStep(*(float(setting["step_ns"][name]) for name in ("median", "low", "high"))),
        )
        for setting in (content.predictions["settings"] if content is not None else ())
        if "step_ns" in setting
    ]
