"""Provides the data of the page Compare besides the comparison: advice, levels, ranks, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis import api
from commprof_dash import traffic_frames
from commprof_dash.charts.series import series_name, with_series
from commprof_dash.components.tables import Order
from commprof_dash.data import Runs
from commprof_dash.measures import COUNT
from commprof_dash.text_columns import text_column

# Closing a ledger reads every record, which takes about a second per million records.
MOST_RECORDS: Final = 200_000
_SAME_BYTES: Final = 0.001  # The same tolerance as in the advice: padding differs by less.
GRID_KEYS: Final = ("reduce_scatter", "use_multi_rank_bucket_allreduce")
_KEY: Final = "."
ABSENT: Final = "(absent)"
_PREDICTED: Final = ("predicted_ns", "predicted_low_ns", "predicted_high_ns")
# A text column is sorted by the number that the text shows.
_SORTED_BY: Final = {"exposed": "exposed_low_ns", "setting": "label"}


def compared(runs: Runs, names: Sequence[str]) -> api.Comparison:
    """Return the complete comparison of the runs."""
    comparison: api.Comparison = runs.of_runs("comparison", names, traffic_frames.compared)
    return comparison


def are_large(runs: Runs, names: Sequence[str]) -> bool:
    """Return whether closing the ledgers of these runs takes too long for a page."""
    listing = runs.listing()
    records = listing.loc[listing["name"].isin(list(names)), "records"].fillna(0).sum()
    return bool(records > MOST_RECORDS)


def levels(runs: Runs, names: Sequence[str]) -> pd.DataFrame | None:
    """Return the requested, issued, executed and moved bytes, with their ``series``.

    Return None while another process closes large ledgers.
    """
    ask = runs.runs_beside if are_large(runs, names) else runs.of_runs
    frame: pd.DataFrame | None = ask("levels", names, api.traffic_levels)
    if frame is None:
        return None
    known = frame["op"].notna()
    series = with_series(frame[known].assign(op=frame.loc[known, "op"].astype(str)))["series"]
    return frame.assign(series=series.reindex(frame.index))


def levels_if_ready(runs: Runs, names: Sequence[str]) -> pd.DataFrame | None:
    """Return :func:`levels`, but None also for large runs that are being recorded."""
    if are_large(runs, names) and runs.is_going(names):
        return None
    return levels(runs, names)


def settings(runs: Runs, names: Sequence[str], moved: pd.DataFrame | None) -> pd.DataFrame:
    """Return one row per setting with all values that the page shows.

    Args:
        moved: The result of :func:`levels`; None while it is not known.
    """
    answers = compared(runs, names)
    frame = _with_predictions(runs, names, runs.comparison(names))
    frame = frame.merge(answers.resources, on="label", how="left", validate="one_to_one")
    advised = answers.advice.settings[["label", "recommended"]]
    frame = frame.merge(advised, on="label", how="left", validate="one_to_one")
    if moved is None:
        frame = frame.assign(moved_bytes_of_rank=float("nan"), moved_over=None)
    else:
        counted = moved.loc[moved["level"] == "moved", ["label", "moved_bytes_of_rank", "moved_over"]]
        frame = frame.merge(counted, on="label", how="left", validate="one_to_one")
    return frame.assign(
        memory_bytes=frame["device_bytes"].fillna(frame["rss_bytes"]),
        setting=pd.Series(
            list(zip(frame["label"], frame["runs"], strict=True)), index=frame.index, dtype="object"
        ),
        exposed=text_column(frame, _exposed_text),
        reduction=text_column(frame, _reduction_text),
    )


class Unrun(NamedTuple):
    """The cell of a setting that was only predicted: its label, and the predicted step time as text."""

    label: str
    step: str


def with_unrun(runs: Runs, names: Sequence[str], frame: pd.DataFrame) -> pd.DataFrame:
    """Return ``frame``, followed by the settings that the sweeps of these runs predicted but did not run.

    The added rows have 0 ``repeats`` and no ``runs``. They are never cached, because they change with the next
    run of their sweep.

    Args:
        frame: The result of :func:`settings`.
    """
    paths: list[Path] = runs.of_runs("paths", names, list)
    known = set(frame["label"])
    rows = []
    for label, step in api.unrun_settings(paths):
        if label not in known:
            known.add(label)
            text = f"{api.format_ns(step.median_ns)} ({api.format_ns(step.low_ns)} to {api.format_ns(step.high_ns)})"
            times = dict(zip(_PREDICTED, step, strict=True))
            rows.append({"label": label, "setting": Unrun(label, text), "repeats": 0, "runs": "", **times})
    return pd.DataFrame([*frame.to_dict("records"), *rows], columns=frame.columns) if rows else frame


def reason(settings: pd.DataFrame, advised: api.Advice) -> str | None:
    """Return one sentence about the differences between two settings.

    Return None if fewer than two settings have step times, if there are no pairs of settings and none is
    recommended, or if no known value differs. The first setting is the recommended one, or else the one with the
    shortest step. The second is the other setting with the most bytes if the first setting sends fewer bytes, or
    else the one with the longest step.
    """
    counted = advised.settings[advised.settings["left_out"].isna()]["label"]
    rows = settings[settings["label"].isin(counted) & settings["step_time_ns"].notna()]
    if len(rows) < 2 or (advised.answer != "recommended" and not len(advised.pairs)):
        return None
    best = rows[rows["recommended"].eq(True)]
    first = (best if len(best) else rows.nsmallest(1, "step_time_ns")).iloc[0]
    others = rows[~rows["recommended"].eq(True) & (rows["label"] != first["label"])]
    if others.empty:
        return None
    by_bytes = others["wire_bytes_per_step"].max() > first["wire_bytes_per_step"] * (1 + _SAME_BYTES)
    second = others.nlargest(1, "wire_bytes_per_step" if by_bytes else "step_time_ns").iloc[0]
    parts = [
        f"{one} instead of {other} {what}"
        for what, one, other in _figures(first, second)
        if one != other and None not in (one, other)
    ]
    if not parts:
        return None
    return f"{first['label']} against {second['label']}, per step: {', '.join(parts)}{_chance(advised, first, second)}."


def _figures(first: pd.Series[Any], second: pd.Series[Any]) -> list[tuple[str, str | None, str | None]]:
    """Return the compared quantities of two settings: the name of each, and its text for both settings."""

    def texts(column: str, write: Any) -> tuple[str | None, str | None]:
        one, other = (None if pd.isna(row[column]) else write(row[column]) for row in (first, second))
        return one, other

    exposed = [api.exposed_time({str(key): value for key, value in row.items()}) for row in (first, second)]
    return [
        ("collectives", *texts("collectives_per_step", COUNT.format)),
        ("on the wire", *texts("wire_bytes_per_step", api.format_bytes)),
        ("exposed", exposed[0], exposed[1]),
        ("of step time", *texts("step_time_ns", api.format_ns)),
    ]


def _chance(advised: api.Advice, first: pd.Series[Any], second: pd.Series[Any]) -> str:
    """Return whether two step times differ by more than repeats do, with the interval.

    Return an empty text if this is not known.
    """
    pairs = advised.pairs
    row = pairs[
        pairs["label"].isin([first["label"], second["label"]])
        & pairs["other"].isin([first["label"], second["label"]])
    ]
    if row.empty or pd.isna(row.iloc[0]["low_ns"]):
        return ""
    verdict, low, high = (
        row.iloc[0]["verdict"],
        *sorted(abs(row.iloc[0][end]) for end in ("low_ns", "high_ns")),
    )
    if verdict in ("shorter", "longer"):
        return f" (a difference of {api.format_ns(low)} to {api.format_ns(high)}, 95 %)"
    return " (step times differ no more than repeats do)"


def ordered(frame: pd.DataFrame, order: Order) -> pd.DataFrame:
    """Return ``frame`` sorted by ``order``. Settings with an unknown value come last."""
    if order.column is None:
        return frame
    by = _SORTED_BY.get(order.column, order.column)
    return frame.sort_values(by, ascending=not order.descending, kind="stable", ignore_index=True)


def _with_predictions(runs: Runs, names: Sequence[str], settings: pd.DataFrame) -> pd.DataFrame:
    """Return ``settings`` with the step times that their sweep predicted.

    The new columns are ``predicted_ns``, ``predicted_low_ns`` and ``predicted_high_ns``.

    Args:
        settings: The settings with the names of their runs in ``runs``. A setting without a prediction gets NaN.
    """
    answers: list[api.PredictedStep | None] = runs.of_runs("predicted_steps", names, api.predicted_steps)
    of_run = dict(zip(names, answers, strict=True))
    rows = [
        next(
            (step for name in str(listed).split(", ") if (step := of_run.get(name)) is not None), (None,) * 3
        )
        for listed in settings["runs"]
    ]
    return settings.join(pd.DataFrame(rows, columns=list(_PREDICTED), index=settings.index, dtype="float64"))


def _exposed_text(setting: Mapping[str, Any]) -> str | None:
    """Return the exposed time of a setting and its share of the step, in the same form as in the report of a run."""
    time, share = api.exposed_time(setting), api.exposed_share(setting)
    return time if share is None else f"{time}, {share}"


def _reduction_text(setting: Mapping[str, Any]) -> str | None:
    """Return the requested gradient reduction and, if it differs, the issued one."""
    requested, issued, meant = (setting[f"{level}_op"] for level in ("requested", "issued", "intended"))
    if pd.isna(issued):
        return None if pd.isna(requested) else f"{requested} -> nothing"
    issued_name = series_name(issued, meant)
    return issued_name if pd.isna(requested) or requested == issued_name else f"{requested} -> {issued_name}"


class Cell(NamedTuple):
    """One cell of the grid: its settings, each as (label, the other keys that distinguish the setting)."""

    row: str
    column: str
    settings: Sequence[tuple[str, str]]


def grid(settings: pd.DataFrame) -> list[list[Cell]]:
    """Return the settings by reduce_scatter and use_multi_rank_bucket_allreduce.

    The result is empty unless both keys vary and every cell has a setting.
    """
    keys = _keys(settings)
    named = [next((key for key in keys if key.rpartition(_KEY)[2] == name), None) for name in GRID_KEYS]
    grid_keys = [key for key in named if key is not None]
    if len(grid_keys) < len(GRID_KEYS):
        return []
    rows, columns = (_values(settings, key) for key in grid_keys)
    rest = [key for key in keys if key not in grid_keys]
    cells = [
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
    is_complete = min(len(rows), len(columns)) > 1 and all(cell.settings for row in cells for cell in row)
    return cells if is_complete else []


def _keys(settings: pd.DataFrame) -> list[str]:
    names = list(settings.columns)
    return [str(name) for name in names[1 : names.index("requested_op")]]


def _values(settings: pd.DataFrame, key: str) -> list[str]:
    # true comes before false, which is the usual order of these keys.
    return sorted({str(value) for value in settings[key]}, key=lambda value: (value != "true", value))


def _words(key: str, value: str) -> str:
    return f"{key.rpartition(_KEY)[2]}={value}"


def _those(
    settings: pd.DataFrame, rest: Sequence[str], grid_keys: Sequence[str], values: tuple[str, str]
) -> list[tuple[str, str]]:
    part = settings
    for key, value in zip(grid_keys, values, strict=True):
        part = part[part[key].astype(str) == value]
    return [
        (
            str(row["label"]),
            ", ".join(_words(key, str(row[key])) for key in rest if row[key] != ABSENT) or "all else equal",
        )
        for row in part.to_dict("records")
    ]
