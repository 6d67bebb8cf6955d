"""Builds the minimap of the timeline: the whole run, and the window as a frame that the browser moves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from dash import html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash.pages.timeline.data import minimap
from commprof_dash.theme import EXPOSED_COLOUR, STEP_COLOUR

MINIMAP: Final = "timeline-minimap"
WINDOW: Final = "timeline-window"


def minimap_card(path: Path, shown: api.Timeline) -> Component:
    """Return the whole run with the window of ``shown``. Dragging over it selects another window."""
    shares = minimap(path)
    length = max(1, shown.run_end_ns - shown.run_begin_ns)
    left = min(max((shown.begin_ns - shown.run_begin_ns) / length, 0.0), 1.0)
    right = min(max((shown.end_ns - shown.run_begin_ns) / length, left), 1.0)
    drawing = _svg([(shares.busy, STEP_COLOUR, 0.45), (shares.exposed, EXPOSED_COLOUR, 0.9)])
    return html.Div(
        [
            html.Img(src=f"data:image/svg+xml,{quote(drawing)}", alt="", draggable="false"),
            html.Div(
                id=WINDOW,
                className="minimap-window",
                style={"left": f"{100 * left}%", "width": f"{100 * (right - left)}%"},
            ),
        ],
        id=MINIMAP,
        className="minimap",
        role="img",
        title="The whole run: communication, and its exposed part in red. Drag to choose a window.",
        **{"aria-label": f"Minimap: {api.format_ns(length)}, with the window as a frame"},
    )


def _svg(layers: Sequence[tuple[Sequence[float], str, float]]) -> str:
    drawn = []
    for values, colour, opacity in layers:
        bars = "".join(
            f"M{cell} 40v-{max(1.0, 38 * value):.1f}h1V40z" for cell, value in enumerate(values) if value > 0
        )
        drawn.append(f'<path d="{bars}" fill="{colour}" fill-opacity="{opacity}"/>')
    cells = max((len(values) for values, _, _ in layers), default=1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {cells} 40" preserveAspectRatio="none">'
        f"{''.join(drawn)}</svg>"
    )
