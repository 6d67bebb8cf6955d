"""Several bars (lanes) for each setting, one below the other, with the setting's label above them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import plotly.graph_objects as go

from commprof_dash.charts.axis_ticks import axis
from commprof_dash.charts.bars import LINE_PIXELS
from commprof_dash.charts.labels import LINE_CHARACTERS, escape, line_count, wrap
from commprof_dash.charts.series import Series, marker
from commprof_dash.theme import MUTED_TEXT, TEXT, Scheme, template

LANE_PIXELS: Final = 20
_BAR_PIXELS: Final = 14
_GAP_PIXELS: Final = 14
_AXIS_PIXELS: Final = 48
_ROOM: Final = 1.6  # right of the longest bar, for its note, at 400 pixels too
_CHARACTER_PIXELS: Final = 7


class Point(NamedTuple):
    """A value in one lane of one setting, and its hover text."""

    setting: int
    lane: int
    value: float
    hover: str


class Bars(NamedTuple):
    """The bars of one series; those in the same lane are stacked."""

    series: Series
    points: Sequence[Point]


class Marks(NamedTuple):
    """Points that are no bars: single ranks, a mean, a largest value."""

    name: str
    colour: str
    symbol: str
    points: Sequence[Point]


class Note(NamedTuple):
    """Text in a lane, right of ``value``; ``muted`` where it stands for something that is not known."""

    setting: int
    lane: int
    value: float
    text: str
    muted: bool = False


class Lanes(NamedTuple):
    """All of a chart: the settings from the top, the names of their lanes, and what is in them.

    ``spans`` are intervals, as (point of the low end, value of the high end).
    """

    labels: Sequence[str]
    names: Sequence[str]
    bars: Sequence[Bars] = ()
    marks: Sequence[Marks] = ()
    notes: Sequence[Note] = ()
    spans: Sequence[tuple[Point, float]] = ()


def figure(
    lanes: Lanes,
    *,
    unit: str,
    title: str,
    scheme: Scheme,
    highest: float | None = None,
    characters: int = LINE_CHARACTERS,
) -> go.Figure:
    """The chart of ``lanes``.

    Args:
        unit: ``bytes``, ``ns`` or ``""``; of the values and the axis, whose title is ``title``.
        highest: of the axis, where several charts share one; default: the highest of this one.
        characters: of a line of a label.
    """
    places = _Places(lanes, characters)
    drawn = go.Figure(layout={"template": template(scheme)})
    # A trace for each series, so that bars in one lane stack and the legend has one entry per series.
    for one in lanes.bars:
        drawn.add_bar(
            orientation="h",
            name=one.series.name,
            x=[point.value for point in one.points],
            y=[places.of(point.setting, point.lane) for point in one.points],
            width=_BAR_PIXELS,
            marker=marker(one.series),
            customdata=[point.hover for point in one.points],
            hovertemplate="%{customdata}<extra></extra>",
        )
    # Shapes and not error bars: an interval may belong to a lane without a bar.
    for point, end in lanes.spans:
        y = places.of(point.setting, point.lane)
        drawn.add_shape(
            type="line", x0=point.value, x1=end, y0=y, y1=y, line={"color": TEXT[scheme], "width": 2}
        )
    for mark in lanes.marks:
        drawn.add_scatter(
            mode="markers",
            name=mark.name,
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
    drawn.update_layout(
        height=places.height + _AXIS_PIXELS,
        margin={"l": places.left, "r": 4, "t": 0, "b": _AXIS_PIXELS},
        barmode="stack",
        annotations=[*_labels(places), *_names(places, scheme), *_notes(places, scheme)],
        xaxis=axis(highest_of(lanes) if highest is None else highest, unit, title, room=_ROOM, count=3),
        yaxis={
            "range": [places.height, 0],
            "showgrid": False,
            "zeroline": False,
            "showticklabels": False,
            "automargin": False,
        },
    )
    return drawn


def highest_of(lanes: Lanes) -> float:
    """The end of the longest bar, mark or interval."""
    sums: dict[tuple[int, int], float] = {}
    for bars in lanes.bars:
        for point in bars.points:
            key = (point.setting, point.lane)
            sums[key] = sums.get(key, 0.0) + point.value
    ends = [point.value for mark in lanes.marks for point in mark.points]
    return max([*sums.values(), *ends, *(end for _, end in lanes.spans)], default=0.0)


class _Places:
    """Where each lane stands, in pixels from the top."""

    def __init__(self, lanes: Lanes, characters: int) -> None:
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
        """The middle of a lane."""
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


def _notes(places: _Places, scheme: Scheme) -> list[dict[str, Any]]:
    return [
        _annotation(
            note.value,
            places.of(note.setting, note.lane),
            escape(note.text) if note.muted else f"<b>{escape(note.text)}</b>",
            xshift=9,
            font={"size": 12, "color": MUTED_TEXT[scheme] if note.muted else TEXT[scheme]},
        )
        for note in places.lanes.notes
    ]
