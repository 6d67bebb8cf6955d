"""Builds the chart of exposed and overlapped communication of a training step."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts.labels import escape
from commprof_dash.charts.lane_charts import Bars, Lanes, Note, Point, figure
from commprof_dash.charts.series import Series
from commprof_dash.theme import EXPOSED_COLOUR, SETTING_COLOURS, Scheme

UNKNOWN: Final = "not known"
_KINDS: Final = (("exposed", EXPOSED_COLOUR), ("overlapped", SETTING_COLOURS[2]))

_LENGTHS: Final = {"exposed": "exposed_low_ns", "overlapped": "overlapped_at_most_ns"}


def by_purpose(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the exposed and overlapped time of a typical step by purpose. Unknown times have a label and no bar.

    Args:
        frame: The columns of ``api.exposure_per_step``, in the order to draw.
    """
    rows: list[dict[str, Any]] = [
        {str(name): value for name, value in row.items()} for row in frame.to_dict("records")
    ]
    bars, notes = [], []
    for lane, (kind, colour) in enumerate(_KINDS):
        points = []
        for position, row in enumerate(rows):
            value, text = row[_LENGTHS[kind]], duration(row, kind)
            if pd.isna(value):
                notes.append(Note(position, lane, 0.0, UNKNOWN, muted=True))
                continue
            hover = f"{escape(row['purpose'])}<br>{kind}: <b>{escape(text)}</b>"
            points.append(Point(position, lane, float(value), hover))
            notes.append(Note(position, lane, float(value), text))
        bars.append(Bars(Series(kind, colour, ""), points))
    return figure(
        Lanes([row["purpose"] for row in rows], [kind for kind, _ in _KINDS], bars, notes=notes),
        unit="ns",
        title="Time per step; purposes overlap",
        scheme=scheme,
    )


def duration(row: dict[str, Any], kind: str) -> str:
    """Return the exposed or overlapped time as text: a value, two bounds, or one bound.

    The bar of an exposed time is as long as its lower bound.
    """
    return (api.exposed_time(row) if kind == "exposed" else api.overlapped_time(row)) or UNKNOWN
