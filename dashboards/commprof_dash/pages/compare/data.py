"""What the Compare page asks of several runs, beside their comparison: advice, levels, ranks, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis import api
from commprof_dash import traffic_frames
from commprof_dash.charts.series import with_series
from commprof_dash.data import Runs
from commprof_dash.text_columns import text_column

MOST_RECORDS: Final = 200_000  # a ledger goes through every record: about a second for a million
GRID_KEYS: Final = ("reduce_scatter", "use_multi_rank_bucket_allreduce")
_KEY: Final = "."
ABSENT: Final = "(absent)"


def compared(runs: Runs, names: Sequence[str]) -> api.Comparison:
    """All that is said of the runs side by side."""
    comparison: api.Comparison = runs.of_runs("comparison", names, traffic_frames.compared)
    return comparison


def are_large(runs: Runs, names: Sequence[str]) -> bool:
    """Whether to close the ledgers of these runs takes longer than a page may."""
    listing = runs.listing()
    records = listing.loc[listing["name"].isin(list(names)), "records"].fillna(0).sum()
    return bool(records > MOST_RECORDS)


def levels(runs: Runs, names: Sequence[str]) -> pd.DataFrame | None:
    """Requested, issued, executed and moved, with their ``series``; None while another process closes large ledgers."""
    ask = runs.runs_beside if are_large(runs, names) else runs.of_runs
    frame: pd.DataFrame | None = ask("levels", names, api.reduction_levels)
    if frame is None:
        return None
    known = frame["op"].notna()
    series = with_series(frame[known].assign(op=frame.loc[known, "op"].astype(str)))["series"]
    return frame.assign(series=series.reindex(frame.index))


class Cost(NamedTuple):
    """What a step of one setting cost, and the loss at its end; None where it is not known."""

    step_time_ns: float | None
    low_ns: float | None
    high_ns: float | None
    exposed: str | None  # with its part of the step
    final_loss: float | None
    memory_bytes: float | None  # of the device where it was read, else resident
    samples_per_second: float | None


def costs(settings: pd.DataFrame, resources: pd.DataFrame) -> dict[str, Cost]:
    """The cost of each setting, by its label."""
    joined = settings.merge(resources, on="label", how="left", validate="one_to_one")
    joined["memory_bytes"] = joined["device_bytes"].fillna(joined["rss_bytes"])
    columns = (
        *("step_time_ns", "step_time_low_ns", "step_time_high_ns", "exposed"),
        *("final_loss", "memory_bytes", "samples_per_second"),
    )
    joined["exposed"] = text_column(joined, exposed_text)
    return {
        str(row["label"]): Cost(*(_value(row[name]) for name in columns)) for row in joined.to_dict("records")
    }


def with_predictions(runs: Runs, names: Sequence[str], settings: pd.DataFrame) -> pd.DataFrame:
    """``settings`` with what their sweep predicted of each: ``predicted_ns``, ``predicted_low_ns``, ``predicted_high_ns``.

    Args:
        settings: with ``runs``, their names; a setting without a prediction has nan.
    """
    answers: list[api.PredictedStep | None] = runs.of_runs("predicted_steps", names, api.predicted_steps)
    of_run = dict(zip(names, answers, strict=True))
    rows = [
        next(
            (step for name in str(listed).split(", ") if (step := of_run.get(name)) is not None), (None,) * 3
        )
        for listed in settings["runs"]
    ]
    columns = ["predicted_ns", "predicted_low_ns", "predicted_high_ns"]
    return settings.join(pd.DataFrame(rows, columns=columns, index=settings.index, dtype="float64"))


def exposed_text(setting: Mapping[str, Any]) -> str | None:
    """Exposed time of a setting and the part of the step that it is, as the report of a run has them."""
    time, share = api.exposed_time(setting), api.exposed_share(setting)
    if share is None:
        return time
    # The step is named: it is the median over the steps of all repeats, and the step time above it is not.
    return f"{time}, {share} of the step of {api.format_ns(round(setting['step_ns']))}"


def _value(value: Any) -> Any:
    return value if isinstance(value, str) else None if pd.isna(value) else float(value)


class Cell(NamedTuple):
    """One cell of the grid: the settings in it, as (label, what else tells it apart)."""

    row: str
    column: str
    settings: Sequence[tuple[str, str]]


def grid(settings: pd.DataFrame) -> list[list[Cell]]:
    """The settings by reduce_scatter and use_multi_rank_bucket_allreduce; empty where the runs differ in neither."""
    keys = _keys(settings)
    grid_keys = [next((key for key in keys if key.rpartition(_KEY)[2] == name), None) for name in GRID_KEYS]
    if not any(grid_keys):
        return []
    rows, columns = (_values(settings, key) for key in grid_keys)
    rest = [key for key in keys if key not in grid_keys]
    return [
        [
            Cell(
                _words(grid_keys[0], row),
                _words(grid_keys[1], column),
                _those(settings, rest, grid_keys, (row, column)),
            )
            for column in columns
        ]
        for row in rows
    ]


def _keys(settings: pd.DataFrame) -> list[str]:
    names = list(settings.columns)
    return [str(name) for name in names[1 : names.index("requested_op")]]


def _values(settings: pd.DataFrame, key: str | None) -> list[str]:
    if key is None:
        return [""]
    # true before false, as the keys are usually told
    return sorted({str(value) for value in settings[key]}, key=lambda value: (value != "true", value))


def _words(key: str | None, value: str) -> str:
    return "" if key is None else f"{key.rpartition(_KEY)[2]}={value}"


def _those(
    settings: pd.DataFrame, rest: Sequence[str], grid_keys: Sequence[str | None], values: tuple[str, str]
) -> list[tuple[str, str]]:
    part = settings
    for key, value in zip(grid_keys, values, strict=True):
        if key is not None:
            part = part[part[key].astype(str) == value]
    return [
        (
            str(row["label"]),
            ", ".join(_words(key, str(row[key])) for key in rest if row[key] != ABSENT) or "all else equal",
        )
        for row in part.to_dict("records")
    ]
