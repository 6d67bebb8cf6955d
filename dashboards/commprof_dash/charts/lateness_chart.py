"""Lateness charts: boxes of how late each rank arrives, and what ranks wait for."""

from __future__ import annotations

from typing import Final

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts.axis_ticks import axis
from commprof_dash.charts.rank_charts import rank_axis
from commprof_dash.charts.series import hatched
from commprof_dash.theme import EXPOSED_COLOUR, SETTING_COLOURS, STEP_COLOUR, Scheme, template

CAUSES: Final = {
    "late_arrival": ("late arrival: another rank had not issued it", EXPOSED_COLOUR, ""),
    "late_launch": ("late launch: issued, but a device had not begun", SETTING_COLOURS[4], "x"),
    "slow_transfer": ("slow transfer: all had begun", STEP_COLOUR, "/"),
}


def boxes(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """How late each rank arrives: a box over the middle half of its collectives, whiskers over nine tenths.

    Args:
        frame: one row per rank: ``rank``, ``p5_ns``, ``p25_ns``, ``median_ns``, ``p75_ns``, ``p95_ns``, ``error_ns``.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    figure.add_box(
        name="middle half, and 5 to 95 %",
        x=frame["rank"].tolist(),
        q1=frame["p25_ns"].astype(float).tolist(),
        median=frame["median_ns"].astype(float).tolist(),
        q3=frame["p75_ns"].astype(float).tolist(),
        lowerfence=frame["p5_ns"].astype(float).tolist(),
        upperfence=frame["p95_ns"].astype(float).tolist(),
        marker={"color": SETTING_COLOURS[0]},
        line={"width": 1.5, "color": SETTING_COLOURS[0]},
        hoverinfo="skip",
    )
    figure.add_scatter(
        name="median",
        mode="markers",
        x=frame["rank"].tolist(),
        y=frame["median_ns"].astype(float).tolist(),
        customdata=[
            f"median {api.format_ns(row['median_ns'])}, half within {api.format_ns(row['p25_ns'])} to "
            f"{api.format_ns(row['p75_ns'])},<br>95 % below {api.format_ns(row['p95_ns'])}, "
            f"error {api.format_ns(row['error_ns'])}"
            for row in frame.to_dict("records")
        ],
        marker={"color": SETTING_COLOURS[0], "size": 7},
        line={"color": SETTING_COLOURS[0]},
        hovertemplate="Rank %{x}: %{customdata}<extra></extra>",
    )
    bound = frame["error_ns"].astype(float)
    if bound.max() > 0:
        figure.add_scatter(
            name="clock error: below this line ranks cannot be distinguished",
            mode="lines",
            x=frame["rank"].tolist(),
            y=bound.tolist(),
            line={"color": EXPOSED_COLOUR, "dash": "dash", "width": 2},
            hoverinfo="skip",
        )
    highest = float(max(frame["p95_ns"].max(), bound.max(), 1)) if len(frame) else 1.0
    figure.update_layout(
        height=320,
        xaxis=rank_axis(frame["rank"]),
        yaxis=axis(highest, "ns", "After the first rank", room=1.08),
    )
    return figure


def causes(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Time by what took longest, stacked, one bar per rank.

    Args:
        frame: columns ``rank``, ``cause``, ``collectives``, ``time_ns``.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    for cause, (name, colour, hatch) in CAUSES.items():
        part = frame[frame["cause"] == cause]
        figure.add_bar(
            name=name,
            x=part["rank"].tolist(),
            y=part["time_ns"].astype(float).tolist(),
            customdata=[
                f"{api.format_ns(time)} in {count:,} collectives"
                for time, count in zip(part["time_ns"], part["collectives"], strict=True)
            ],
            marker=hatched(colour, hatch, 0.35),
            hovertemplate="Rank %{x}<br>" + name + ": <b>%{customdata}</b><extra></extra>",
        )
    highest = float(frame.groupby("rank")["time_ns"].sum().max()) if len(frame) else 0.0
    figure.update_layout(
        height=320,
        barmode="stack",
        xaxis=rank_axis(frame["rank"]),
        yaxis=axis(highest, "ns", "Time in collectives", room=1.05),
    )
    return figure
