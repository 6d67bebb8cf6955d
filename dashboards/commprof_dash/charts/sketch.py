"""Collects the traces and the layout of a figure, and creates the figure in one call.

Plotly checks every property of every trace, and checks every change of the layout again. This takes 7 ms for a
figure of three bars, and a page has up to five figures. Tests compare the figures with checked ones
(tests/unit/commprof_dash/test_detail_pages.py).
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from commprof_dash.theme import Scheme, template


class Sketch:
    """A figure under construction.

    Attributes:
        traces: The traces with their properties.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.traces: list[dict[str, Any]] = []
        self._layout: dict[str, Any] = {"template": template(scheme)}

    def add_bar(self, **properties: Any) -> None:
        """Add bars."""
        self._add("bar", properties)

    def add_box(self, **properties: Any) -> None:
        """Add boxes."""
        self._add("box", properties)

    def add_heatmap(self, **properties: Any) -> None:
        """Add a heatmap."""
        self._add("heatmap", properties)

    def add_scatter(self, **properties: Any) -> None:
        """Add points or lines."""
        self._add("scatter", properties)

    def update_layout(self, **properties: Any) -> None:
        """Set properties of the layout. Each property is replaced as a whole."""
        self._layout |= {key: each for key, each in properties.items() if each is not None and each != []}

    def figure(self) -> go.Figure:
        """Return the figure. Its properties are not checked."""
        return go.Figure(self.traces, self._layout, _validate=False)

    def _add(self, kind: str, properties: dict[str, Any]) -> None:
        self.traces.append(
            {"type": kind} | {key: each for key, each in properties.items() if each is not None}
        )
