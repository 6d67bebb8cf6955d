"""Builds charts with several bars (lanes) for each setting, one below another, with the setting's label above them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import plotly.graph_objects as go

from commprof_dash.charts.axis_ticks import axis
from commprof_dash.charts.bars import LINE_PIXELS
from commprof_dash.charts.labels import escape, line_count, wrap
from commprof_dash.charts.series import Series, marker
from commprof_dash.theme import HOLLOW, MUTED_TEXT, TEXT, Scheme, template

LANE_PIXELS: Final = 16
_BAR_PIXELS: Final = 12
_GAP_PIXELS: Final = 8
_AXIS_PIXELS: Final = 48
_ROOM: Final = 1.6  # the room for the note right of the longest bar, also at a width of 400 pixels
_LEFT: Final = (0.0, 0.6)  # the part of the width for the first chart if a second chart is beside it
_RIGHT: Final = (0.64, 1.0)
_ROOM_BESIDE: Final = 2.4
_CHARACTER_PIXELS: Final = 7


class Point(NamedTuple):
    """A value in one lane of one setting, and its hover text."""

    setting: int
    lane: int
    value: float
    hover: str


class Bars(NamedTuple):
    """The bars of one series. Bars in the same lane are stacked.

    ``hollow`` draws only the outline, for values that were not measured.
    """

    series: Series
    points: Sequence[Point]
    hollow: bool = False


class Marks(NamedTuple):
    """Points that are drawn as marks: single ranks, a mean, a largest value."""

    name: str
    colour: str
    symbol: str
    points: Sequence[Point]


class Note(NamedTuple):
    """Text in a lane, right of ``value``. ``muted`` is for a text about an unknown value."""

    setting: int
    lane: int
    value: float
    text: str
    muted: bool = False


class Lanes(NamedTuple):
    """The content of a chart: the settings from the top, the names of their lanes, and the contents of the lanes.

    ``spans`` are intervals, as (point of the low end, value of the high end).
    """

    labels: Sequence[str]
    names: Sequence[str]
    bars: Sequence[Bars] = ()
    marks: Sequence[Marks] = ()
    notes: Sequence[Note] = ()
    spans: Sequence[tuple[Point, float]] = ()


class Beside(NamedTuple):
    """A second chart on the same rows, right of the first chart, with its own axis.

    Its settings and lanes are those of the first chart.
    """

    lanes: Lanes
    unit: str
    title: str
    highest: float | None = None


def figure(
    lanes: Lanes,
    *,
    unit: str,
    title: str,
    scheme: Scheme,
    highest: float | None = None,
    characters: int | None = None,
    beside: Beside | None = None,
) -> go.Figure:
    """Return the chart of ``lanes``.

    Args:
        unit: The unit of the values and of the axis: ``bytes``, ``ns`` or ``""``.
        title: The title of the axis.
        highest: The end of the axis if several charts share one; by default, the highest value of this chart.
        characters: The length of a line of a label; by default, the length that fits the screen.
        beside: A second chart, right of this one.
    """
    places = _Places(lanes, characters)
    drawn = go.Figure(layout={"template": template(scheme)})
    _draw(drawn, places, lanes, scheme, "x")
    longest = highest_of(lanes) if highest is None else highest
    drawn.update_layout(
        height=places.height + _AXIS_PIXELS,
        margin={"l": places.left, "r": 4, "t": 0, "b": _AXIS_PIXELS},
        barmode="stack",
        annotations=[*_labels(places), *_names(places, scheme), *_notes(places, lanes, scheme, "x")],
        xaxis=axis(longest, unit, title, room=_ROOM, count=3),
        yaxis={
            "range": [places.height, 0],
            "showgrid": False,
            "zeroline": False,
            "showticklabels": False,
            "automargin": False,
        },
    )
    if beside is not None:
        _draw(drawn, places, beside.lanes, scheme, "x2")
        end = highest_of(beside.lanes) if beside.highest is None else beside.highest
        right = axis(end, beside.unit, beside.title, room=_ROOM_BESIDE, count=2)
        drawn.update_layout(xaxis={"domain": _LEFT}, xaxis2=right | {"domain": _RIGHT, "anchor": "y"})
        for note in _notes(places, beside.lanes, scheme, "x2"):
            drawn.add_annotation(note)
    return drawn


def _draw(drawn: go.Figure, places: _Places, lanes: Lanes, scheme: Scheme, x: str) -> None:
    """Add the bars, intervals and marks of ``lanes`` to the axis ``x``."""
    # Each series has one trace, so that bars in one lane stack and the legend has one entry per series.
    for one in lanes.bars:
        drawn.add_bar(
            orientation="h",
            name=one.series.name,
            x=[point.value for point in one.points],
            y=[places.of(point.setting, point.lane) for point in one.points],
            width=_BAR_PIXELS,
            xaxis=x,
            marker=(
                {"color": HOLLOW, "line": {"color": one.series.colour, "width": 2}}
                if one.hollow
                else marker(one.series)
            ),
            customdata=[point.hover for point in one.points],
            hovertemplate="%{customdata}<extra></extra>",
        )
    # These are shapes and not error bars, because an interval may belong to a lane without a bar.
    for point, end in lanes.spans:
        y = places.of(point.setting, point.lane)
        drawn.add_shape(
            type="line",
            xref=x,
            x0=point.value,
            x1=end,
            y0=y,
            y1=y,
            line={"color": TEXT[scheme], "width": 2},
        )
    for mark in lanes.marks:
        drawn.add_scatter(
            mode="markers",
            name=mark.name,
            xaxis=x,
            x=[point.value for point in mark.points],
            y=[places.of(point.setting, point.lane) for point in mark.points],
            marker={
                "color": mark.colour,
                "symbol": mark.symbol,
                "size": 9,
                "line": {"width": 2, "color": mark.colour},
            },
            line={"color": mark.colour},
            customdata=[point.hover for point in mark.points],
            hovertemplate="%{customdata}<extra></extra>",
        )


def highest_of(lanes: Lanes) -> float:
    """Return the end of the longest bar, mark or interval."""
    sums: dict[tuple[int, int], float] = {}
    for bars in lanes.bars:
        for point in bars.points:
            key = (point.setting, point.lane)
            sums[key] = sums.get(key, 0.0) + point.value
    ends = [point.value for mark in lanes.marks for point in mark.points]
    return max([*sums.values(), *ends, *(end for _, end in lanes.spans)], default=0.0)


class _Places:
    """The position of each lane, in pixels from the top."""

    def __init__(self, lanes: Lanes, characters: int | None) -> None:
        self.lanes = lanes
        self.wrapped = [wrap(label, characters) for label in lanes.labels]
        self.left = 10 + _CHARACTER_PIXELS * max((len(name) for name in lanes.names), default=0)
        self.tops: list[float] = []
        at = 4.0
        for text in self.wrapped:
            self.tops.append(at)
            at += LINE_PIXELS * line_count(text) + 4 + LANE_PIXELS * len(lanes.names) + _GAP_PIXELS
        self.height = at

    def of(self, setting: int, lane: int) -> float:
        """Return the position of the middle of a lane."""
        label = LINE_PIXELS * line_count(self.wrapped[setting]) + 4
        return self.tops[setting] + label + LANE_PIXELS * (lane + 0.5)


def _annotation(x: float, y: float, text: str, **looks: Any) -> dict[str, Any]:
    return {"x": x, "y": y, "text": text, "showarrow": False, "xanchor": "left", "font": {"size": 12}} | looks


def _labels(places: _Places) -> list[dict[str, Any]]:
    return [
        _annotation(0, top, text, xref="paper", xshift=-places.left + 4, yanchor="top", align="left")
        for top, text in zip(places.tops, places.wrapped, strict=True)
    ]


def _names(places: _Places, scheme: Scheme) -> list[dict[str, Any]]:
    looks = {"font": {"size": 12, "color": MUTED_TEXT[scheme]}, "xref": "paper", "xshift": -places.left + 4}
    return [
        _annotation(0, places.of(i, lane), escape(name), **looks)
        for i in range(len(places.wrapped))
        for lane, name in enumerate(places.lanes.names)
    ]


def _notes(places: _Places, lanes: Lanes, scheme: Scheme, x: str) -> list[dict[str, Any]]:
    return [
        _annotation(
            note.value,
            places.of(note.setting, note.lane),
            escape(note.text) if note.muted else f"<b>{escape(note.text)}</b>",
            xref=x,
            xshift=9,
            font={"size": 12, "color": MUTED_TEXT[scheme] if note.muted else TEXT[scheme]},
        )
        for note in lanes.notes
    ]
