"""Find the successive trainings of a run.

A program may train a second model after the first, or the same model in another way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow.compute as pc

from commprof.analysis.time.intervals import over_steps
from commprof.trace.reader import Run

_TRAINED: Final = "B"  # marks a backward pass that reduces gradients in the passes of a wrapper


class Training(NamedTuple):
    """The steps of one training, and the median of their times without the first step."""

    first_step: int
    last_step: int
    step_time_ns: int | None


def trainings(run: Run, times: pd.DataFrame) -> list[Training]:
    """Return the trainings of ``run``.

    A training begins with the first step after an engine was created, or after DDP or FSDP wrapped a model
    that is trained. The list is empty for a single training, for a restarted run, and if no second training
    is known to begin.

    Args:
        run: The run.
        times: The step_times of the run.
    """
    if times["attempt"].nunique() > 1:
        return []
    ends = sorted(
        {end for end in (*_before_engines(run.manifest.engines), *_before_wrappers(run)) if end >= 0}
    )
    if not ends:
        return []
    part = times["step"].map(lambda step: bisect_left(ends, step))
    spans = [_training(rows) for _, rows in times.groupby(part)]
    return spans if len(spans) > 1 else []


def _training(times: pd.DataFrame) -> Training:
    first = int(times["step"].min())
    later = times.loc[times["step"] > first, "duration_ns"].dropna()
    return Training(first, int(times["step"].max()), over_steps([int(value) for value in later]).center)


def _before_engines(engines: Sequence[dict[str, Any]]) -> list[int]:
    """Return the last step before each engine. The list is empty if engines share their steps."""
    if any(each.get("share_steps") for each in engines):
        return []
    return [int(each["after"]) for each in engines]


def _before_wrappers(run: Run) -> list[int]:
    """Return the last step before the first gradient reduction of each model that was wrapped during training.

    Models that begin to reduce gradients in the first step with a reduction are not included.
    """
    wrappers = run.table("wrappers").select(["rank", "pid", "number", "step"])
    latest = pc.max(wrappers["step"]).as_py()
    if latest is None or latest < 0:
        return []
    # A wrapper is published again when the program changes how it wraps, so the first step counts.
    made_in: dict[tuple[Any, ...], int] = {}
    for row in wrappers.to_pylist():
        key = row["rank"], row["pid"], row["number"]
        made_in[key] = min(row["step"], made_in.get(key, row["step"]))
    begins: dict[tuple[Any, ...], int] = {}
    for row in run.table("wrapper_passes").to_pylist():
        if _TRAINED in row["passes"]:
            key = row["rank"], row["pid"], row["number"]
            begins[key] = min(row["step"], begins.get(key, row["step"]))
    first = min(begins.values(), default=0)
    return [step - 1 for key, step in begins.items() if made_in.get(key, -1) >= 0 and step > first]


def sentence(spans: Sequence[Training]) -> str:
    """Return a sentence that lists the steps of each training and explains the effect on values per step."""
    listed = ", ".join(f"{each.first_step} to {each.last_step}" for each in spans)
    return (
        f"The run has {len(spans)} trainings, one after the other: steps {listed}. Values per step mix them; "
        "commprof report has those of each"
    )
