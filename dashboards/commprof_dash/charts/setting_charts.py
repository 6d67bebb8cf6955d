"""Builds charts that compare settings.

They show the four levels with the step time, the bytes of each rank, memory, and samples per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts.labels import escape
from commprof_dash.charts.lane_charts import Bars, Beside, Lanes, Marks, Note, Point, figure
from commprof_dash.charts.series import Series, series_in_order
from commprof_dash.charts.time_charts import interval_text
from commprof_dash.theme import MUTED_TEXT, SETTING_COLOURS, STEP_COLOUR, TEXT, Scheme

LEVELS: Final = ("requested", "issued", "executed", "moved")
UNKNOWN: Final = "not known"
UNRUN: Final = "not run"
CELL_CHARACTERS: Final = 46
# The end of the axis as a multiple of the longest bar. Moved bytes beyond it are drawn at the end of the
# axis, with an arrow.
_MOST_MOVED: Final = 1.3
_DIRECTIONS: Final = ("sent", "received")


def levels(
    frame: pd.DataFrame,
    times: pd.DataFrame,
    labels: Mapping[str, str],
    ends: tuple[float, float],
    scheme: Scheme,
    characters: int | None = None,
) -> go.Figure:
    """Return a row per setting: wire bytes of a step at each level, moved bytes as a mark, and the step time beside.

    Args:
        frame: The columns of ``api.traffic_levels`` and ``series``.
        times: The columns ``label``, ``step_time_ns``, ``step_time_low_ns``, ``step_time_high_ns`` and
            ``repeats``, and ``predicted_ns``, ``predicted_low_ns``, ``predicted_high_ns``, which are drawn
            hollow. ``repeats`` is 0 for a setting that was only predicted.
        labels: For each setting to draw, in order, its name in this chart.
        ends: The ends of the axes of bytes and of times, which several figures share (see :func:`ends_of`).
    """
    place = {label: position for position, label in enumerate(labels)}
    part = frame[frame["label"].isin(list(labels))]
    lanes = LEVELS if frame["moved_bytes_of_rank"].notna().any() else LEVELS[:-1]
    known = part[part["wire_bytes_per_step"].notna()]
    sums = known.groupby(["label", "level", "series"], as_index=False, sort=False)[
        "wire_bytes_per_step"
    ].sum()
    bars = [
        Bars(series, [_level_point(row, place) for row in _rows(sums[sums["series"] == series.name])])
        for series in series_in_order(sums["series"])
    ]
    notes = [
        _level_note(place[str(label)], LEVELS.index(str(level)), rows, ends[0])
        for (label, level), rows in part.groupby(["label", "level"], sort=False)
        if level in lanes
    ]
    unrun = times.loc[times["repeats"] == 0, "label"]
    notes += [Note(place[str(label)], 0, 0.0, UNRUN, muted=True) for label in unrun if label in place]
    return figure(
        Lanes(
            list(labels.values()),
            lanes,
            bars=bars,
            marks=_moved_marks(part, place, ends[0], scheme),
            notes=notes,
        ),
        unit="bytes",
        title="Wire bytes, modelled",
        scheme=scheme,
        highest=ends[0],
        characters=characters,
        beside=Beside(_times(times, place), "ns", "Step time", ends[1]),
    )


def ends_of(frame: pd.DataFrame, times: pd.DataFrame) -> tuple[float, float]:
    """Return the ends of both axes: the most bytes and the longest step time of any setting.

    ``frame`` and ``times`` are those of :func:`levels`. Moved bytes far beyond the modelled ones do not stretch
    the axis.
    """
    sums = frame.groupby(["label", "level"])["wire_bytes_per_step"].sum()
    modelled = float(sums.max()) if len(sums) else 0.0
    # The counters also include other programs, which must not make the bars unreadable.
    counted = float(frame["moved_bytes_of_rank"].fillna(0.0).max())
    most = max(modelled, min(counted, _MOST_MOVED * modelled)) if modelled else counted
    longest = times[["step_time_ns", "step_time_high_ns", "predicted_ns", "predicted_high_ns"]].astype(
        "float64"
    )
    return most, float(longest.fillna(0.0).to_numpy().max(initial=0.0))


def _level_point(row: Mapping[str, Any], place: Mapping[str, int]) -> Point:
    value = float(row["wire_bytes_per_step"])
    text = (
        f"{escape(row['label'])}<br>{row['level']}: <b>{escape(row['series'])}</b> {api.format_bytes(value)}"
    )
    return Point(place[row["label"]], LEVELS.index(row["level"]), value, text)


def _level_note(setting: int, lane: int, rows: pd.DataFrame, end: float) -> Note:
    if LEVELS[lane] == "moved":
        moved = rows["moved_bytes_of_rank"].iloc[0]
        if pd.isna(moved):
            return Note(setting, lane, 0.0, "not counted", muted=True)
        beyond = " \u2192" if moved > end else ""
        return Note(setting, lane, min(float(moved), end), f"{api.format_bytes(moved)}{beyond}", muted=True)
    total = rows["wire_bytes_per_step"].sum(min_count=1)
    if pd.isna(total):
        return Note(setting, lane, 0.0, UNKNOWN, muted=True)
    at_least = ">= " if rows["wire_bytes_per_step"].isna().any() else ""
    return Note(setting, lane, float(total), f"{at_least}{api.format_bytes(float(total))}")


def _moved_marks(part: pd.DataFrame, place: Mapping[str, int], end: float, scheme: Scheme) -> list[Marks]:
    marks = []
    for over, name, symbol in (
        ("step", "moved per rank in a step", "diamond"),
        ("run", "moved per rank and step, whole run", "diamond-open"),
    ):
        rows = part[(part["moved_over"] == over) & part["moved_bytes_of_rank"].notna()]
        points = [
            Point(
                place[row["label"]],
                LEVELS.index("moved"),
                min(float(row["moved_bytes_of_rank"]), end),
                f"{escape(row['label'])}<br>{name}: <b>{api.format_bytes(row['moved_bytes_of_rank'])}</b>"
                f"<br>all hosts: {api.format_bytes(row['moved_bytes'])} in a {over}, all traffic",
            )
            for row in _rows(rows)
        ]
        if points:
            marks.append(Marks(name, TEXT[scheme], symbol, points))
    return marks


def _times(times: pd.DataFrame, place: Mapping[str, int]) -> Lanes:
    """Return the measured step times in the second lane of a row, and the predicted ones in the third lane."""
    bars, notes, spans = [], [], []
    for lane, kind, name in ((1, "step_time", "step time"), (2, "predicted", "predicted step time")):
        points = []
        for row in _rows(times[times["label"].isin(list(place))]):
            setting = place[row["label"]]
            value, low, high = (row[f"{kind}{end}_ns"] for end in ("", "_low", "_high"))
            if pd.isna(value):
                if kind == "step_time" and row["repeats"]:
                    notes.append(Note(setting, lane, 0.0, UNKNOWN, muted=True))
                continue
            interval = interval_text(
                *(math.nan if pd.isna(each) else float(each) for each in (value, low, high))
            )
            points.append(
                Point(setting, lane, float(value), f"{escape(row['label'])}<br>{name}: <b>{interval}</b>")
            )
            reach = float(value if pd.isna(high) else high)
            if not pd.isna(high):
                spans.append((Point(setting, lane, float(low), ""), reach))
            notes.append(Note(setting, lane, reach, api.format_ns(round(value)), muted=lane == 2))
        if points:
            bars.append(Bars(Series(name, STEP_COLOUR, ""), points, hollow=lane == 2))
    return Lanes((), (), bars=bars, notes=notes, spans=spans)


def ranks(frame: pd.DataFrame, labels: Sequence[str], scheme: Scheme, executed: bool = False) -> go.Figure:
    """Return a point for each rank, with the bytes that it sends and receives in a step.

    The chart also shows how far the largest rank is above the mean.

    Args:
        frame: The columns of ``api.rank_bytes``.
        executed: Whether the bytes are those of the executed operations instead of the issued ones.
    """
    marks, notes = [], []
    for lane, direction in enumerate(_DIRECTIONS):
        column = f"{'executed_' if executed else ''}{direction}_bytes_per_step"
        points = [
            Point(
                labels.index(row["label"]),
                lane,
                float(row[column]),
                f"{escape(row['label'])}<br>rank {row['rank']} {direction} <b>{api.format_bytes(row[column])}</b>",
            )
            for row in _rows(frame)
        ]
        marks.append(Marks(f"{direction} by a rank", SETTING_COLOURS[lane], "circle-open", points))
        for position, label in enumerate(labels):
            values = frame.loc[frame["label"] == label, column]
            notes.append(_imbalance(position, lane, values))
    return figure(
        Lanes(labels, _DIRECTIONS, marks=marks, notes=notes),
        unit="bytes",
        title=f"Wire bytes of a rank per step, modelled{'' if executed else ', as issued'}",
        scheme=scheme,
    )


def _imbalance(setting: int, lane: int, values: pd.Series[Any]) -> Note:
    if values.empty or not values.mean():
        return Note(setting, lane, 0.0, UNKNOWN if values.empty else "nothing", muted=True)
    highest = float(values.max())
    return Note(setting, lane, highest, f"{highest / float(values.mean()):.2f} x")


def memory(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the resident and device memory: a bar for the median over steps, a mark for the largest value.

    Args:
        frame: The columns of ``api.resources``, in the order to draw.
    """
    kinds = [
        (name, column)
        for name, column in (("resident", "rss"), ("device", "device"))
        if frame[f"{column}_bytes"].notna().any()
    ]
    bars, peaks, notes = [], [], []
    for lane, (name, column) in enumerate(kinds):
        points = []
        for i, row in enumerate(_rows(frame)):
            value, peak = row[f"{column}_bytes"], row[f"{column}_peak_bytes"]
            if pd.isna(value) or pd.isna(peak):
                notes.append(Note(i, lane, 0.0, UNKNOWN, muted=True))
                continue
            median, largest = api.format_bytes(value), api.format_bytes(peak)
            text = f"{escape(row['label'])}<br>{name}: median <b>{median}</b>, largest {largest}"
            points.append(Point(i, lane, float(value), text))
            peaks.append(Point(i, lane, float(peak), text))
            notes.append(Note(i, lane, float(max(peak, value)), api.format_bytes(value)))
        bars.append(Bars(Series(f"{name}, median of steps", SETTING_COLOURS[2 + lane], ""), points))
    peak_marks = Marks("largest of all steps", MUTED_TEXT[scheme], "line-ns-open", peaks)
    return figure(
        Lanes(
            [str(label) for label in frame["label"]], [name for name, _ in kinds], bars, [peak_marks], notes
        ),
        unit="bytes",
        title="Memory of the largest rank",
        scheme=scheme,
    )


def samples(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the samples per second with their interval over repeats.

    Args:
        frame: The columns of ``api.resources``, in the order to draw.
    """
    points, notes, spans = [], [], []
    for i, row in enumerate(_rows(frame)):
        value, low, high = (row[name] for name in ("samples_per_second", "samples_low", "samples_high"))
        if pd.isna(value) or not math.isfinite(value):
            notes.append(Note(i, 0, 0.0, UNKNOWN, muted=True))
            continue
        points.append(
            Point(i, 0, float(value), f"{escape(row['label'])}<br><b>{value:.4g}</b> samples per second")
        )
        has_interval = not pd.isna(high)
        notes.append(
            Note(i, 0, float(high if has_interval else value), f"{value:.4g} ({row['samples_from']})")
        )
        if has_interval:
            spans.append((Point(i, 0, float(low), ""), float(high)))
    return figure(
        Lanes(
            [str(label) for label in frame["label"]],
            [""],
            [Bars(Series("samples per second", STEP_COLOUR, ""), points)],
            notes=notes,
            spans=spans,
        ),
        unit="",
        title="Samples per second",
        scheme=scheme,
    )


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
