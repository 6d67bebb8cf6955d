"""Builds the charts of step times: over a run, and across settings with their intervals."""

from __future__ import annotations

import math

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts import bars
from commprof_dash.charts.axis_ticks import axis, step_ticks
from commprof_dash.charts.listed import listed
from commprof_dash.theme import EXPOSED_COLOUR, STEP_COLOUR, TEXT, Scheme, template


def over_steps(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the step time and its exposed communication.

    Args:
        frame: The columns ``step``, ``duration_ns``, ``exposed_ns``, ``exposed_low_ns`` and ``exposed_high_ns``.
            The last two are drawn if ``exposed_ns`` is not known.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    drawn = [("duration_ns", "step time, slowest rank", STEP_COLOUR), *_exposed_lines(frame)]
    for column, name, colour in drawn:
        part = frame[frame[column].notna()]
        if part.empty:
            continue
        figure.add_scatter(
            name=name,
            mode="lines+markers" if len(part) <= 60 else "lines",
            x=listed(part["step"].tolist()),
            y=listed(part[column].astype(float).tolist()),
            customdata=listed(api.format_ns(value) for value in part[column].tolist()),
            line={"color": colour, "width": 2},
            marker={"size": 6},
            hovertemplate="Step %{x}<br><b>" + name + "</b>: %{customdata}<extra></extra>",
        )
    highest = float(frame[[column for column, _, _ in drawn]].max().max()) if len(frame) else 0.0
    figure.update_layout(
        height=300,
        xaxis={"title": {"text": "Training step"}, "showgrid": False, **step_ticks(frame["step"])},
        yaxis=axis(highest, "ns", "Time per step", room=1.05),
    )
    return figure


def _exposed_lines(frame: pd.DataFrame) -> list[tuple[str, str, str]]:
    name = "exposed communication, mean of ranks"
    if frame["exposed_ns"].notna().any() or frame["exposed_low_ns"].isna().all():
        return [("exposed_ns", name, EXPOSED_COLOUR)]
    low = ("exposed_low_ns", f"{name}, at least", EXPOSED_COLOUR)
    return [low, ("exposed_high_ns", f"{name}, at most", EXPOSED_COLOUR)]


def by_setting(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the median step time of each setting as a bar, with its 95 % interval as a line across the end of the bar.

    Args:
        frame: The columns ``label``, ``step_time_ns``, ``step_time_low_ns``, ``step_time_high_ns``, in the order
            to draw.
    """
    rows = bars.rows_of([str(label) for label in frame["label"]])
    times, low, high = (
        frame[name].astype(float).tolist()
        for name in ("step_time_ns", "step_time_low_ns", "step_time_high_ns")
    )
    reach = [
        max((v for v in ends if not math.isnan(v)), default=0.0) for ends in zip(times, high, strict=True)
    ]
    figure = go.Figure(layout={"template": template(scheme)})
    numbers = ["no step time" if math.isnan(value) else api.format_ns(value) for value in times]
    figure.add_bar(
        orientation="h",
        name="median step time",
        x=times,
        y=list(range(len(rows.labels))),
        width=bars.BAR_PIXELS / rows.pixels,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [_span(value, end) for value, end in zip(times, high, strict=True)],
            "arrayminus": [_span(begin, value) for value, begin in zip(times, low, strict=True)],
            "color": TEXT[scheme],
            "thickness": 2,
            "width": 6,
        },
        marker={"color": STEP_COLOUR, "line": {"width": 0}},
        customdata=[
            [rows.wrapped[i], interval_text(*value)]
            for i, value in enumerate(zip(times, low, high, strict=True))
        ],
        hovertemplate="%{customdata[0]}<br><b>%{customdata[1]}</b><extra></extra>",
    )
    notes = [bars.number_annotation(reach[i], i, text) | {"xshift": 10} for i, text in enumerate(numbers)]
    figure.update_layout(
        bars.row_layout(rows),
        annotations=bars.label_annotations(rows) + notes,
        xaxis=axis(max(reach, default=0), "ns", "Time per step", room=1.3),
    )
    return figure


def interval_text(value: float, low: float, high: float) -> str:
    """Return a value with its interval: ``12.3 ms (11.9 ms to 12.8 ms)``; without the interval if there is none."""
    if math.isnan(value):
        return "no step time"
    if math.isnan(low) or math.isnan(high):
        return api.format_ns(value)
    return f"{api.format_ns(value)} ({api.format_ns(low)} to {api.format_ns(high)})"


def _span(begin: float, end: float) -> float:
    return 0.0 if math.isnan(begin) or math.isnan(end) else max(0.0, end - begin)
