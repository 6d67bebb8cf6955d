"""Builds a grid of figures with one legend and the same axes, which compares settings by two keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go
from dash import html
from dash.development.base_component import Component

from commprof_dash.components import cards
from commprof_dash.components.folds import fold
from commprof_dash.components.graph import graph
from commprof_dash.components.legend import legend
from commprof_dash.components.tables import Field, rows_text, table


class GridCell(NamedTuple):
    """One figure and its heading."""

    title: str
    figure: go.Figure


def grid_card(
    name: str,
    title: str,
    subtitle: str,
    cells: Sequence[Sequence[GridCell]],
    frame: pd.DataFrame,
    fields: Sequence[Field],
    how: Component | None = None,
) -> Component:
    """Return a card with ``cells`` row by row and one text legend above them.

    Wide pages show the cells of a row side by side.
    """
    traces = {trace.name: trace for row in cells for cell in row for trace in cell.figure.data}
    shown = []
    for i, row in enumerate(cells):
        for j, cell in enumerate(row):
            inside = graph(f"{name}-{i}-{j}", cell.figure, f"{title}, {cell.title}. {subtitle}")
            shown.append(html.Div([html.H3(cell.title), inside], className="grid-cell"))
    width = max((len(row) for row in cells), default=1)
    return cards.body_card(
        name,
        title,
        subtitle,
        [
            legend(go.Figure(data=list(traces.values()))),
            html.Div(shown, className="figure-grid", style={"--columns": str(width)}),
            html.Div(
                [
                    fold(f"Table ({rows_text(len(frame))})", [table(frame, fields, title)]),
                    how,
                ],
                className="card-folds",
            ),
        ],
        frame,
    )
