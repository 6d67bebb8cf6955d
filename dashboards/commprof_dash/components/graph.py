"""Creates every Graph, so that all figures have the same controls."""

from __future__ import annotations

from typing import Any, Final

import plotly.graph_objects as go
from dash import dcc, html
from dash.development.base_component import Component

from commprof_dash import ids

# showSendToCloud: plotly.js would otherwise offer to upload the figure to its vendor.
GRAPH_CONFIG: Final[dict[str, Any]] = {
    "showSendToCloud": False,
    "displaylogo": False,
    "displayModeBar": False,
    "responsive": True,
    "scrollZoom": False,
    "doubleClick": False,
}


def graph(name: str, figure: go.Figure, description: str, zoomable: bool = False) -> Component:
    """``figure`` on the page, ``description`` for those who do not see it.

    ``zoomable``: the wheel zooms.
    """
    return html.Div(
        dcc.Graph(
            id=ids.graph(name),
            figure=figure,
            config=GRAPH_CONFIG | {"scrollZoom": zoomable},
            responsive=True,
            style=height_of(figure),
        ),
        role="img",
        **{"aria-label": description},
    )


def height_of(figure: go.Figure) -> dict[str, str]:
    """The style of a graph that is as high as its figure; a callback that changes the one changes the other."""
    return {"height": f"{figure.layout.height}px"}
