"""Builds the charts of traffic by setting, by step and by purpose. Each chart shows one measure, named on its axis."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from commprof_dash.charts import bars
from commprof_dash.charts.axis_ticks import axis, step_ticks
from commprof_dash.charts.labels import escape
from commprof_dash.charts.listed import listed
from commprof_dash.charts.series import marker, series_in_order
from commprof_dash.measures import Measure
from commprof_dash.theme import Scheme, template


def by_setting(frame: pd.DataFrame, labels: list[str], measure: Measure, scheme: Scheme) -> go.Figure:
    """Return one stacked bar per setting, in the order of ``labels``.

    Args:
        frame: The columns ``label``, ``series`` and the measure's mean per step; rows of the same label and
            series are summed.
    """
    return _stacked_rows(frame, "label", labels, measure, scheme)


def by_purpose(frame: pd.DataFrame, measure: Measure, scheme: Scheme) -> go.Figure:
    """Return one stacked bar per purpose, the largest first.

    ``frame`` is as in :func:`by_setting`, with ``purpose``.
    """
    order = frame.groupby("purpose")[measure.per_step].sum().sort_values(ascending=False, kind="stable")
    return _stacked_rows(frame, "purpose", [str(name) for name in order.index], measure, scheme)


def _stacked_rows(
    frame: pd.DataFrame, row: str, labels: list[str], measure: Measure, scheme: Scheme
) -> go.Figure:
    cells = frame.groupby([row, "series"])[measure.per_step].sum().to_dict()
    series = series_in_order(frame["series"])
    return bars.stacked(
        bars.rows_of(labels),
        series,
        {one.name: [float(cells.get((label, one.name), 0.0)) for label in labels] for one in series},
        unit=measure.unit,
        title=f"{measure.name} per step",
        format_value=measure.format,
        scheme=scheme,
    )


def by_step(frame: pd.DataFrame, measure: Measure, scheme: Scheme) -> go.Figure:
    """Return one stacked bar per step.

    Args:
        frame: The columns ``step``, ``steps`` (the number of steps that the bar is the mean of), ``series`` and
            the measure per step.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    wide = int(frame["steps"].max()) if len(frame) else 1
    for one in series_in_order(frame["series"]):
        part = frame[frame["series"] == one.name]
        figure.add_bar(
            name=one.name,
            x=listed(part["step"].tolist()),
            y=listed(part[measure.per_step].astype(float).tolist()),
            width=wide * 0.8,
            offset=-0.4 if wide > 1 else None,
            customdata=listed(
                [_steps_text(step, steps), measure.format(value)]
                for step, steps, value in zip(
                    part["step"].tolist(),
                    part["steps"].tolist(),
                    part[measure.per_step].tolist(),
                    strict=True,
                )
            ),
            marker=marker(one),
            hovertemplate="%{customdata[0]}<br><b>"
            + escape(one.name)
            + "</b>: %{customdata[1]}<extra></extra>",
        )
    highest = float(frame.groupby("step")[measure.per_step].sum().max()) if len(frame) else 0.0
    figure.update_layout(
        barmode="stack",
        height=300,
        xaxis={"title": {"text": "Training step"}, "showgrid": False, **step_ticks(frame["step"])},
        yaxis=axis(highest, measure.unit, f"{measure.name} per step", room=1.05),
    )
    return figure


def _steps_text(first: int, steps: int) -> str:
    return f"Step {first}" if steps == 1 else f"Steps {first} to {first + steps - 1}, mean"
