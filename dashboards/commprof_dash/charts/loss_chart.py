"""Builds the loss charts: the final loss of each setting, and loss against step."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from commprof_dash.charts.axis_ticks import step_ticks
from commprof_dash.charts.labels import escape, wrap
from commprof_dash.charts.listed import listed
from commprof_dash.theme import SETTING_COLOURS, Scheme, template

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def curves(frame: pd.DataFrame, labels: list[str], scheme: Scheme) -> go.Figure:
    """Return the loss against the step, one line per setting, in the order of ``labels``.

    Args:
        frame: The columns ``label``, ``step``, ``loss``; one row per label and step.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    for position, label in enumerate(labels):
        looks = {
            "color": SETTING_COLOURS[position % len(SETTING_COLOURS)],
            "dash": _DASHES[position % len(_DASHES)],
            "width": 2,
        }
        part = frame[frame["label"] == label].sort_values("step")
        figure.add_scatter(
            name=escape(label),
            mode="lines+markers" if len(part) <= 60 else "lines",
            x=listed(part["step"].tolist()),
            y=listed(part["loss"].astype(float).tolist()),
            line=looks,
            marker={"size": 5},
            hovertemplate=wrap(label) + "<br>Step %{x}: loss <b>%{y:.6g}</b><extra></extra>",
        )
    figure.update_layout(
        height=300,
        xaxis={"title": {"text": "Training step"}, "showgrid": False, **step_ticks(frame["step"])},
        yaxis={"title": {"text": "Training loss"}},
    )
    return figure
