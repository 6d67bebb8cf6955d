"""Builds horizontal bars with the label of each row above its bar, so that long labels need no margin at any width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import plotly.graph_objects as go

from commprof_dash.charts.axis_ticks import axis
from commprof_dash.charts.labels import line_count, wrap
from commprof_dash.charts.series import Series, marker
from commprof_dash.theme import Scheme, template, text_on

BAR_PIXELS: Final = 24
LINE_PIXELS: Final = 16
_GAP_PIXELS: Final = 16
_AXIS_PIXELS: Final = 48
_ROOM: Final = 1.28  # the room for the number right of the longest bar


class Rows(NamedTuple):
    """The rows of a chart: their labels from the top, and the height of each row in pixels."""

    labels: Sequence[str]
    wrapped: Sequence[str]
    label_pixels: int  # the height of the label above the bar

    @property
    def pixels(self) -> int:
        """The pixels from one bar to the next."""
        return BAR_PIXELS + self.label_pixels + _GAP_PIXELS

    @property
    def above(self) -> int:
        """The pixels from the top of the plot to the middle of the first bar."""
        return self.label_pixels + BAR_PIXELS // 2 + 6

    @property
    def below(self) -> int:
        """The pixels from the middle of the last bar to the bottom of the plot."""
        return BAR_PIXELS // 2 + 8

    @property
    def height(self) -> int:
        """The height of the plot in pixels."""
        return self.above + (len(self.labels) - 1) * self.pixels + self.below


def rows_of(labels: Sequence[str]) -> Rows:
    """Return rows that are high enough for the longest of ``labels``."""
    wrapped = [wrap(label) for label in labels]
    return Rows(labels, wrapped, LINE_PIXELS * max((line_count(text) for text in wrapped), default=1))


def label_annotations(rows: Rows) -> list[dict[str, Any]]:
    """Return the label of each row, above its bar and aligned with the start of the bar."""
    return [
        {
            "x": 0,
            "xref": "paper",
            "y": position,
            "yshift": BAR_PIXELS / 2 + 1,
            "text": text,
            "align": "left",
            "xanchor": "left",
            "yanchor": "bottom",
            "showarrow": False,
            "font": {"size": 12},
        }
        for position, text in enumerate(rows.wrapped)
    ]


def number_annotation(x: float, position: int, text: str) -> dict[str, Any]:
    """Return the number at the end of a bar."""
    return {
        "x": x,
        "y": position,
        "text": f"<b>{text}</b>",
        "xanchor": "left",
        "xshift": 4,
        "showarrow": False,
        "font": {"size": 12},
    }


def row_axis(rows: Rows) -> dict[str, Any]:
    """Return the vertical axis, which has row 0 at the top and room for the label above it."""
    return {
        "range": [len(rows.labels) - 1 + rows.below / rows.pixels, -rows.above / rows.pixels],
        "showgrid": False,
        "zeroline": False,
        "showticklabels": False,
        "tickvals": list(range(len(rows.labels))),
    }


def row_layout(rows: Rows) -> dict[str, Any]:
    """Return the height, margins and vertical axis of a chart of ``rows``."""
    return {
        "height": rows.height + _AXIS_PIXELS,
        "margin": {"l": 4, "r": 4, "t": 0, "b": _AXIS_PIXELS},
        "yaxis": row_axis(rows),
    }


def stacked(
    rows: Rows,
    series: Sequence[Series],
    values: dict[str, Sequence[float]],
    *,
    unit: str,
    title: str,
    format_value: Callable[[float], str],
    scheme: Scheme,
) -> go.Figure:
    """Return stacked bars, one per row, with the sum at the end and the name of each series inside its bar if it fits.

    Args:
        values: For each series, its value in each row.
        unit: The unit of the values and of the axis: ``bytes``, ``ns`` or ``""``.
        title: The title of the axis.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    totals = [sum(values[one.name][i] for one in series) for i in range(len(rows.labels))]
    for one in series:
        figure.add_bar(
            orientation="h",
            name=one.name,
            x=list(values[one.name]),
            y=list(range(len(rows.labels))),
            customdata=[
                [text, format_value(value)]
                for text, value in zip(rows.wrapped, values[one.name], strict=True)
            ],
            text=[one.name if value else "" for value in values[one.name]],
            textposition="inside",
            insidetextanchor="start",
            textangle=0,
            textfont={"color": text_on(one.colour), "size": 12},
            marker=marker(one),
            width=BAR_PIXELS / rows.pixels,
            hovertemplate="%{customdata[0]}<br><b>" + one.name + "</b>: %{customdata[1]}<extra></extra>",
        )
    numbers = [number_annotation(total, i, format_value(total)) for i, total in enumerate(totals)]
    figure.update_layout(
        row_layout(rows),
        barmode="stack",
        uniformtext={"minsize": 11, "mode": "hide"},
        annotations=label_annotations(rows) + numbers,
        xaxis=axis(max(totals, default=0), unit, title, room=_ROOM),
    )
    return figure
