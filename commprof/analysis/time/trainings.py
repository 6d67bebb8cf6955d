"""Trainings of a run one after the other: a program may train a second model, or the same one in another way."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow.compute as pc

from commprof.analysis.time.intervals import over_steps
from commprof.trace.reader import Run

_TRAINED: Final = "B"  # in the passes of a wrapper: a backward pass that reduces gradients


class Training(NamedTuple):
    """The steps of one training, and the median of their times without the first."""

    first_step: int
    last_step: int
    step_time_ns: int | None


def trainings(run: Run, times: pd.DataFrame) -> list[Training]:
    """The trainings of ``run``; empty for a single one, for a restarted run, and where none is known to begin anew.

    A training begins with the first step after an engine was made, or after DDP or FSDP wrapped a model that is trained.

    Args:
        run: the run.
        times: its step_times.
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
    """The last step before each engine; none of engines that share their steps."""
    if any(each.get("share_steps") for each in engines):
        return []
    return [int(each["after"]) for each in engines]


def _before_wrappers(run: Run) -> list[int]:
    """The last step before each model that was wrapped later than others begins to reduce gradients."""
    wrappers = run.table("wrappers").select(["rank", "pid", "number", "step"])
    latest = pc.max(wrappers["step"]).as_py()
    if latest is None or latest < 0:
        return []
    made_in: dict[tuple[Any, ...], int] = {}  # published again when the program changes how it wraps
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
    """Which steps belong to which training, and what that means for values per step."""
    listed = ", ".join(f"{each.first_step} to {each.last_step}" for each in spans)
    return (
        f"The run has {len(spans)} trainings, one after the other: steps {listed}. Values per step mix them; "
        "commprof report has those of each"
    )
