"""Builds the charts of experts: load by expert and step, and lines of imbalance, drops and bytes over the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from commprof.schema import Op
from commprof_dash.charts.axis_ticks import axis, step_ticks
from commprof_dash.charts.labels import escape
from commprof_dash.charts.listed import listed
from commprof_dash.charts.matrix_chart import mixed
from commprof_dash.theme import OP_COLOURS, PAPER, SETTING_COLOURS, Scheme, template

# The largest number of columns in the heat map. If there are more steps, neighboring steps are summed.
MOST_STEPS: Final = 240
_FAINTEST: Final = 0.06
_MOST_WRITTEN: Final = 16  # the largest number of steps and experts for which a cell has room for its number
_EXPERT_PIXELS: Final = 18
_HEIGHTS: Final = (260, 640)
_OTHER_PIXELS: Final = 118  # the pixels of the figure above and below the cells
_AXIS_PIXELS: Final = 42  # the part of _OTHER_PIXELS between the cells and the color bar


class Line(NamedTuple):
    """A line over the steps: its column, its name, its color."""

    column: str
    name: str
    colour: str


def load(tokens: pd.DataFrame, dropped: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return a cell for each expert (row) and training step (column), colored by its load divided by the mean load.

    Args:
        tokens: The number of tokens that chose each expert; the index contains experts, the columns first steps.
        dropped: The number of these tokens that were dropped, in the same form.
    """
    mean = tokens.mean()
    loads = (tokens / mean.where(mean > 0)).fillna(0.0)
    steps, experts = [int(step) for step in tokens.columns], [int(expert) for expert in tokens.index]
    cells = [
        [*map(tuple, zip(*rows, strict=True))]
        for rows in zip(loads.to_numpy(), tokens.to_numpy(), dropped.to_numpy(), strict=True)
    ]
    # The scale reaches at least 2, because otherwise noise would fill the scale of a nearly even load.
    highest = max(2.0, float(loads.to_numpy().max(initial=0.0)))
    colour = OP_COLOURS[Op.ALL_TO_ALL]
    low, high = _HEIGHTS
    height = min(high, max(low, _EXPERT_PIXELS * len(experts) + _OTHER_PIXELS))
    figure = go.Figure(layout={"template": template(scheme)})
    # Numbers are written only if each number fits its cell.
    is_written = len(steps) <= _MOST_WRITTEN and len(experts) <= _MOST_WRITTEN
    figure.add_heatmap(
        name="load over the mean",
        x=list(range(len(steps))),
        y=list(range(len(experts))),
        z=loads.to_numpy().tolist(),
        customdata=[
            [
                f"Step {step}, expert {expert}<br><b>{value:.2f}</b> times the mean: {chosen:,} tokens, {lost:,} dropped"
                for step, (value, chosen, lost) in zip(steps, row, strict=True)
            ]
            for expert, row in zip(experts, cells, strict=True)
        ],
        text=[[f"{value:.2f}" for value in row] for row in loads.to_numpy().tolist()] if is_written else None,
        texttemplate="%{text}" if is_written else None,
        zmin=0,
        zmax=highest,
        colorscale=[[0, mixed(PAPER[scheme], colour, _FAINTEST)], [1, colour]],
        colorbar={
            "title": {
                "text": "Load over the mean of the experts (1: even)",
                "side": "top",
                "font": {"size": 12},
            },
            "orientation": "h",
            "thickness": 12,
            "outlinewidth": 0,
            "y": -_AXIS_PIXELS / (height - _OTHER_PIXELS),
            "yanchor": "top",
            "nticks": 6,
        },
        xgap=1 if len(steps) <= 64 else 0,
        ygap=1 if len(experts) <= 64 else 0,
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": _OTHER_PIXELS - 8},
        xaxis=_ticks(steps) | {"title": {"text": "Training step"}},
        yaxis=_ticks(experts) | {"title": {"text": "Expert"}, "autorange": "reversed"},
    )
    return figure


def _ticks(names: Sequence[int]) -> dict[str, object]:
    every = max(1, -(-len(names) // _MOST_WRITTEN))
    return {
        "tickvals": list(range(0, len(names), every)),
        "ticktext": [str(name) for name in names[::every]],
        "showgrid": False,
        "zeroline": False,
    }


def over_steps(
    frame: pd.DataFrame,
    lines: Sequence[Line],
    unit: str,
    title: str,
    write: Callable[[float], str],
    scheme: Scheme,
) -> go.Figure:
    """Return a line for each column over the training steps. The axis starts at 0.

    Args:
        frame: The column ``step`` and the columns of ``lines``; missing values are gaps.
        unit: The unit of the axis (see :func:`commprof_dash.charts.axis_ticks.axis`).
        write: The function that formats a value.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    for line in lines:
        part = frame[frame[line.column].notna()]
        figure.add_scatter(
            name=line.name,
            mode="lines+markers" if len(part) <= 60 else "lines",
            x=listed(part["step"].tolist()),
            y=listed(part[line.column].astype(float).tolist()),
            customdata=listed(write(value) for value in part[line.column].tolist()),
            line={"color": line.colour, "width": 2},
            marker={"size": 6},
            hovertemplate="Step %{x}<br><b>" + line.name + "</b>: %{customdata}<extra></extra>",
        )
    highest = float(frame[[line.column for line in lines]].max().max()) if len(frame) else 0.0
    figure.update_layout(
        height=260,
        xaxis={"title": {"text": "Training step"}, "showgrid": False, **step_ticks(frame["step"])},
        yaxis=axis(highest, unit, title, room=1.05),
    )
    return figure


def by_layer(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return a line of the imbalance over the steps for each layer.

    If there are many layers, only those with the largest median are shown.

    Args:
        frame: The columns ``step``, ``layer`` and ``imbalance``. The last row of a repeated step counts.
    """
    typical = frame.groupby("layer")["imbalance"].median().sort_values(ascending=False, kind="stable")
    layers = [str(layer) for layer in typical.index[: len(SETTING_COLOURS)]]
    rows = frame[frame["layer"].isin(layers)].drop_duplicates(["step", "layer"], keep="last")
    wide = rows.pivot(index="step", columns="layer", values="imbalance").reset_index()
    lines = [
        Line(layer, escape(layer), colour) for layer, colour in zip(layers, SETTING_COLOURS, strict=False)
    ]
    return over_steps(wide, lines, "", "Largest load over the mean", "{:.2f}".format, scheme)
