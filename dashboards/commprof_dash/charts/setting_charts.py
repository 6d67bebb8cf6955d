"""Settings side by side: the four levels of reducing gradients, the bytes of each rank, memory, samples per second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts.labels import LINE_CHARACTERS, escape
from commprof_dash.charts.lane_charts import Bars, Lanes, Marks, Note, Point, figure
from commprof_dash.charts.series import Series, series_in_order
from commprof_dash.theme import MUTED_TEXT, SETTING_COLOURS, STEP_COLOUR, Scheme

LEVELS: Final = ("requested", "issued", "executed", "moved")
UNKNOWN: Final = "not known"
CELL_CHARACTERS: Final = 46
_DIRECTIONS: Final = ("sent", "received")


def levels(
    frame: pd.DataFrame,
    labels: Mapping[str, str],
    highest: float,
    scheme: Scheme,
    characters: int = LINE_CHARACTERS,
) -> go.Figure:
    """What each setting requested, issued and executed, as bars of wire bytes; what moved, as text, is another measure.

    Args:
        frame: columns of ``api.reduction_levels`` and ``series``.
        labels: for each setting to draw, in order, what it is called here.
        highest: end of the axis, shared with other figures.
    """
    place = {label: position for position, label in enumerate(labels)}
    part = frame[frame["label"].isin(list(labels))]
    known = part[part["wire_bytes_per_step"].notna()]
    bars = [
        Bars(series, [_level_point(row, place) for row in _rows(known[known["series"] == series.name])])
        for series in series_in_order(known["series"])
    ]
    notes = []
    for (label, level), rows in part.groupby(["label", "level"], sort=False):
        setting, lane = place[str(label)], LEVELS.index(str(level))
        notes.append(_level_note(setting, lane, rows))
    return figure(
        Lanes(list(labels.values()), LEVELS, bars=bars, notes=notes),
        unit="bytes",
        title="Wire bytes per step, modelled",
        scheme=scheme,
        highest=highest,
        characters=characters,
    )


def highest_level(frame: pd.DataFrame) -> float:
    """The most wire bytes of any setting and level."""
    sums = frame.groupby(["label", "level"])["wire_bytes_per_step"].sum()
    return float(sums.max()) if len(sums) else 0.0


def _level_point(row: Mapping[str, Any], place: Mapping[str, int]) -> Point:
    value = float(row["wire_bytes_per_step"])
    text = (
        f"{escape(row['label'])}<br>{row['level']}: <b>{escape(row['series'])}</b> {api.format_bytes(value)}"
    )
    return Point(place[row["label"]], LEVELS.index(row["level"]), value, text)


def _level_note(setting: int, lane: int, rows: pd.DataFrame) -> Note:
    if LEVELS[lane] == "moved":
        moved, over = rows["moved_bytes"].iloc[0], rows["moved_over"].iloc[0]
        if pd.isna(moved):
            return Note(setting, lane, 0.0, "not counted", muted=True)
        span = "a step" if over == "step" else "in the whole run"
        return Note(setting, lane, 0.0, f"{api.format_bytes(moved)} {span}, all hosts", muted=True)
    total = rows["wire_bytes_per_step"].sum(min_count=1)
    if pd.isna(total):
        return Note(setting, lane, 0.0, UNKNOWN, muted=True)
    return Note(setting, lane, float(total), api.format_bytes(float(total)))


def ranks(frame: pd.DataFrame, labels: Sequence[str], scheme: Scheme, executed: bool = False) -> go.Figure:
    """A point for each rank: what it sends and receives in a step, and how far the largest is above the mean.

    Args:
        frame: columns of ``api.rank_bytes``.
        executed: of what the backends run in place of the operations as issued.
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
    """Resident and device memory: a bar for the median over steps, a mark for the largest.

    Args:
        frame: columns of ``api.resources``, in the order to draw.
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
    """Samples per second with their interval over repeats.

    Args:
        frame: columns of ``api.resources``, in the order to draw.
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
