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

_MOST_GROWTH: Final = 3


def graph(
    name: str, figure: go.Figure, description: str, zoomable: bool = False, beside: int | None = None
) -> Component:
    """``figure`` on the page, ``description`` for those who do not see it.

    Args:
        zoomable: the wheel zooms.
        beside: as of :func:`height_of`.
    """
    return html.Div(
        dcc.Graph(
            id=ids.graph(name),
            figure=figure,
            config=GRAPH_CONFIG | {"scrollZoom": zoomable},
            responsive=True,
            style=height_of(figure, beside),
        ),
        role="img",
        **{"aria-label": description},
    )


def height_of(figure: go.Figure, beside: int | None = None) -> dict[str, str]:
    """The style of a graph that is as high as its figure; a callback that changes the one changes the other.

    Args:
        beside: pixels of the window that are left to the rest of the page; the graph grows into those that the window has
            beyond, up to :data:`_MOST_GROWTH` times its height. None: it does not grow.
    """
    height = figure.layout.height
    if beside is None:
        return {"height": f"{height}px"}
    return {"height": f"clamp({height}px, 100vh - {beside}px, {_MOST_GROWTH * height}px)"}
