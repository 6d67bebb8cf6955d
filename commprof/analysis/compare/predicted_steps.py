"""The step times that ``commprof sweep --predict`` predicted for the runs of its directory, before it ran them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from commprof.errors import CommprofError
from commprof.trace.manifest import read_manifest
from commprof.trace.predictions_file import read_predictions


class PredictedStep(NamedTuple):
    """A predicted step in ns, mean over ranks, with its 80 % interval."""

    median_ns: float
    low_ns: float
    high_ns: float


def predicted_steps(runs: Sequence[Path]) -> list[PredictedStep | None]:
    """The prediction of each run; None without one: no sweep with ``--predict``, refused, or a file that was changed."""
    return [_predicted_step(Path(run)) for run in runs]


def _predicted_step(run: Path) -> PredictedStep | None:
    try:
        content = read_predictions(run.parent)
        sweep = read_manifest(run).sweep if content is not None else None
    except CommprofError:
        return None
    if content is None or sweep is None:
        return None
    for setting in content.predictions["settings"]:
        if setting["set"] == sweep.get("point") and "step_ns" in setting:
            return PredictedStep(*(float(setting["step_ns"][name]) for name in ("median", "low", "high")))
    return None
