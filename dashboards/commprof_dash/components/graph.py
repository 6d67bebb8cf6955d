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
    """Return the component that shows ``figure``, with ``description`` as its text for screen readers.

    Args:
        zoomable: Whether the mouse wheel zooms.
        beside: See :func:`height_of`.
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
    """Return the style of a graph that is as high as its figure.

    A callback that changes the figure's height has to change this style, too.

    Args:
        beside: The height in pixels of the rest of the page. If the window is higher, the graph grows to fill the
            window, up to :data:`_MOST_GROWTH` times its height. None: The graph does not grow.
    """
    height = figure.layout.height
    if beside is None:
        return {"height": f"{height}px"}
    return {"height": f"clamp({height}px, 100vh - {beside}px, {_MOST_GROWTH * height}px)"}
