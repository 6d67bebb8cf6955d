"""Builds the legend of a figure as text beside it, which wraps on narrow screens and never covers the figure."""

from __future__ import annotations

from html import unescape
from typing import Any, Final

import plotly.graph_objects as go
from dash import html
from dash.development.base_component import Component

from commprof_dash.theme import HOLLOW

_MARKERS: Final = {
    "x-thin-open": "\u2715",
    "diamond-open": "\u25c7",
    "diamond": "\u25c6",
    "line-ew": "\u2013",
}
_SYMBOLS: Final = {  # symbols that distinguish lines of the same color
    "circle": "\u25cf",
    "square": "\u25a0",
    "triangle-up": "\u25b2",
    "diamond": "\u25c6",
    "cross": "\u271a",
    "star": "\u2605",
    "hexagon": "\u2b22",
    "pentagon": "\u2b1f",
}


def legend(figure: go.Figure) -> Component | None:
    """Return a legend with one entry per trace, drawn like the trace; None if there is only one trace."""
    if len(figure.data) < 2:
        return None
    return html.Ul(
        [html.Li([_swatch(trace), unescape(trace.name)]) for trace in figure.data], className="legend"
    )


def _swatch(trace: Any) -> Component:
    if trace.type == "scatter" and trace.stackgroup:
        hatched = " hatched" if trace.fillpattern.shape else ""
        return html.Span(className="swatch" + hatched, style={"backgroundColor": trace.fillcolor})
    if trace.type == "scatter" and "lines" not in trace.mode:
        symbol = _MARKERS.get(trace.marker.symbol, "\u25cf")
        return html.Span(symbol, style={"color": trace.marker.color}, **{"aria-hidden": "true"})
    if trace.type == "scatter" and trace.marker.symbol in _SYMBOLS:
        symbol = _SYMBOLS[trace.marker.symbol]
        return html.Span(symbol, style={"color": trace.line.color}, **{"aria-hidden": "true"})
    if trace.type == "scatter":
        dash = trace.line.dash or "solid"
        style = "dotted" if "dot" in dash else "dashed" if "dash" in dash else "solid"
        return html.Span(className="line-swatch", style={"borderTop": f"3px {style} {trace.line.color}"})
    if trace.marker.color == HOLLOW:
        line = trace.marker.line
        outline = {"boxShadow": f"inset 0 0 0 {line.width}px {line.color}"}
        return html.Span(className="swatch", style=outline)
    pattern = getattr(trace.marker, "pattern", None)  # boxes have no pattern
    hatched = " hatched" if pattern is not None and pattern.shape else ""
    return html.Span(className="swatch" + hatched, style={"backgroundColor": trace.marker.color})
