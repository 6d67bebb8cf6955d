"""What a training step stands still for, and what it hides behind its work."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts.labels import escape
from commprof_dash.charts.lanes import Bars, Lanes, Note, Point, figure
from commprof_dash.charts.series import Series
from commprof_dash.theme import EXPOSED_COLOUR, SETTING_COLOURS, Scheme

UNKNOWN: Final = "not known"
_KINDS: Final = (("exposed", EXPOSED_COLOUR), ("overlapped", SETTING_COLOURS[2]))


def by_purpose(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Exposed and overlapped time of a typical step, by purpose. What is not known is said and never drawn as 0.

    Args:
        frame: columns of ``api.exposure_per_step``, in the order to draw.
    """
    rows: list[dict[str, Any]] = [
        {str(name): value for name, value in row.items()} for row in frame.to_dict("records")
    ]
    bars, notes = [], []
    for lane, (kind, colour) in enumerate(_KINDS):
        points = []
        for position, row in enumerate(rows):
            value, text = row[f"{kind}_ns"], duration(row, kind)
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
        title="Time per step, median of steps",
        scheme=scheme,
    )


def duration(row: dict[str, Any], kind: str) -> str:
    """Exposed time is at least so much where it is not known of all records; overlapped at most, where not all ends are."""
    value = row[f"{kind}_ns"]
    if pd.isna(value):
        return UNKNOWN
    if kind == "exposed" and row["timed"] < row["records"]:
        return f">= {api.format_ns(value)}"
    bounded = kind == "overlapped" and value > 0 and row["sampled"] < row["records"]
    return f"<= {api.format_ns(value)}" if bounded else api.format_ns(value)
