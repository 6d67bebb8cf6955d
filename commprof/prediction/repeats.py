"""Predict from several runs of the same setting, so that the random deviation of each run has less effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, stdev
from typing import Any

import numpy as np

from commprof.calibration.results import Calibration
from commprof.errors import UsageError
from commprof.prediction.assumptions import AS_RECORDED, Assumptions
from commprof.prediction.predictions import (
    OF_A_RUN,
    OF_THE_MODEL,
    Base,
    Predicted,
    Prediction,
    Setting,
    predict_from,
    replayed_run,
)
from commprof.trace.reader import Run


def predict_repeats(
    runs: Sequence[Run],
    settings: Sequence[tuple[Setting, Mapping[str, Any] | None]],
    assumptions: Assumptions = AS_RECORDED,
    calibration: Calibration | None = None,
) -> Prediction:
    """Predict from each of ``runs`` with :func:`~commprof.prediction.predictions.predict`, and take the medians.

    The reasons and the critical path are those of the run with the median prediction. A part of the interval
    represents the difference between two runs, and shrinks with the number of runs. This difference is measured in
    these runs, and is at least :data:`~commprof.prediction.predictions.OF_A_RUN`.

    Args:
        runs: The runs of one setting, in the given order.
        settings: Each setting with its config, or with None for the config of the run.
        assumptions: Other differences from the runs.
        calibration: A calibration of the runs' hosts, for messages that the runs do not have.

    Raises:
        UsageError: A run cannot be replayed, the runs send different messages, or no setting can be predicted.
    """
    once = {run.path.resolve(): run for run in reversed(runs)}  # a run that is given twice counts once
    return predict_from_several(
        {str(run.path): replayed_run(run, calibration) for run in reversed(once.values())},
        settings,
        assumptions,
    )


def predict_from_several(
    bases_by_path: Mapping[str, Base],
    settings: Sequence[tuple[Setting, Mapping[str, Any] | None]],
    assumptions: Assumptions = AS_RECORDED,
) -> Prediction:
    """Predict from several runs that were already replayed, by their paths, like :func:`predict_repeats`.

    Raises:
        UsageError: The runs send different messages, or no setting can be predicted.
    """
    _refuse_different(bases_by_path)
    bases = list(bases_by_path.values())
    steps = [base.recorded_ns for base in bases]
    of_a_run = max(OF_A_RUN, stdev(steps) / median(steps)) if len(steps) > 1 else OF_A_RUN
    between = float(np.hypot(OF_THE_MODEL, of_a_run / np.sqrt(len(steps))))
    answers = [predict_from(base._replace(between=between), settings, assumptions) for base in bases]
    first = answers[0]
    if len(answers) == 1:
        return first
    purposes = {purpose for each in answers for purpose in each.recorded_exposed_ns}
    listed = ", ".join(f"{ns / 1e6:.1f}" for ns in steps)
    return Prediction(
        median(steps),
        median(each.replay_ns for each in answers),
        {
            purpose: median(each.recorded_exposed_ns.get(purpose, 0.0) for each in answers)
            for purpose in sorted(purposes)
        },
        [_middle([each.settings[number] for each in answers]) for number in range(len(settings))],
        sum(each.steps for each in answers),
        [*first.notes, f"from {len(bases)} runs of the same setting, whose median steps took {listed} ms"],
    )


def _refuse_different(bases: Mapping[str, Base]) -> None:
    (one, of_one), *others = bases.items()
    first = of_one.recorded
    for path, base in others:
        other = base.recorded
        if base.request.config != of_one.request.config:
            raise UsageError(f"the configs of {path} and of {one} differ; give runs of one setting")
        if (other.program, other.world_size, other.device) != (first.program, first.world_size, first.device):
            counts = [len(each.program.messages) for each in (other, first)]
            raise UsageError(
                f"{path} sends {counts[0]} messages per step on {other.world_size} ranks, and {one} {counts[1]} on "
                f"{first.world_size}, or in another order; give runs of one setting"
            )


def _middle(answers: Sequence[Predicted | tuple[Setting, str]]) -> Predicted | tuple[Setting, str]:
    """Return the median of the predictions of one setting, or the first refusal if a run has one."""
    predicted = [each for each in answers if isinstance(each, Predicted)]
    if len(predicted) < len(answers):
        return next(each for each in answers if not isinstance(each, Predicted))
    ordered = sorted(predicted, key=lambda each: each.median_ns)
    middle = ordered[(len(ordered) - 1) // 2]
    ns = median(each.median_ns for each in predicted)
    half = median(each.high_ns - each.median_ns for each in predicted)
    purposes = dict.fromkeys(purpose for each in predicted for purpose in each.exposed_ns)
    return middle._replace(
        median_ns=ns,
        low_ns=max(0.0, ns - half),
        high_ns=ns + half,
        exposed_ns={
            purpose: median(each.exposed_ns.get(purpose, 0.0) for each in predicted) for purpose in purposes
        },
        comm_free_ns=median(each.comm_free_ns for each in predicted),
        no_straggler_ns=median(each.no_straggler_ns for each in predicted),
    )
