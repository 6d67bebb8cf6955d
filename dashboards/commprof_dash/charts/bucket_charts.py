"""Builds the charts of gradient buckets: how full each bucket was, and how long its reduction took."""

from __future__ import annotations

from typing import Final

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts.axis_ticks import axis
from commprof_dash.charts.labels import escape
from commprof_dash.charts.series import marker, series_in_order
from commprof_dash.theme import EXPOSED_COLOUR, OTHER_COLOUR, STEP_COLOUR, TEXT, Scheme, template

_FEW: Final = 5
_MOST_OF_BARS: Final = 12  # A capacity is drawn up to this multiple of the largest bucket.


def sizes(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the bytes of each bucket in the color of the operation that reduced it, with a line at the capacity.

    Args:
        frame: The columns ``label``, ``bytes``, ``numel``, ``fill``, ``series``.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    labels = frame["label"].tolist()
    for one in series_in_order(frame["series"]):
        part = frame[frame["series"] == one.name]
        figure.add_bar(
            name=one.name,
            x=part["label"].tolist(),
            y=part["bytes"].astype(float).tolist(),
            customdata=[
                f"{api.format_bytes(size)}, {float(numel):,.0f} elements"
                + ("" if pd.isna(fill) else f"<br>{100 * fill:.0f} % full")
                for size, numel, fill in zip(part["bytes"], part["numel"], part["fill"], strict=True)
            ],
            marker=marker(one),
            hovertemplate="Bucket %{x}<br><b>" + escape(one.name) + "</b>: %{customdata}<extra></extra>",
        )
    full = capacities(frame)
    full = full.where(full <= _MOST_OF_BARS * frame["bytes"].astype(float).max())
    if full.notna().any():
        figure.add_scatter(
            name="full",
            mode="markers",  # a line between buckets would suggest values between them
            marker={
                "symbol": "line-ew",
                "size": 40,
                "color": OTHER_COLOUR,
                "line": {"width": 3, "color": TEXT[scheme]},
            },
            x=labels,
            y=[None if pd.isna(value) else float(value) for value in full],
            hoverinfo="skip",
        )
    highest = max(float(frame["bytes"].max()), float(full.max()) if full.notna().any() else 0.0)
    figure.update_layout(
        height=300,
        hovermode="x",  # a click anywhere in the column of a small bar selects the bar
        barmode="stack",
        bargap=0.6 if len(labels) < _FEW else 0.2,
        xaxis=_bucket_axis(labels),
        yaxis=axis(highest, "bytes", "Bytes of the bucket", room=1.05),
    )
    return figure


def capacities(frame: pd.DataFrame) -> pd.Series[float]:
    """Return the bytes of each bucket if it were full; NaN if its runtime reports no capacity."""
    return (frame["bytes"].astype(float) / frame["fill"].astype(float)).where(frame["fill"] > 0)


def are_drawn(frame: pd.DataFrame) -> bool:
    """Return whether the figure shows a capacity.

    Capacities that are much larger than all buckets are not drawn, because the buckets would be too small to see.
    """
    return bool((capacities(frame) <= _MOST_OF_BARS * frame["bytes"].astype(float).max()).any())


def times(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the time from issue to the last known end of each bucket, and the exposed part of this time.

    Args:
        frame: The columns ``label``, ``duration_ns``, ``exposed_ns``.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    labels = frame["label"].tolist()
    for column, name, colour in (
        ("duration_ns", "issue to completion", STEP_COLOUR),
        ("exposed_ns", "exposed", EXPOSED_COLOUR),
    ):
        values = frame[column]
        if column == "exposed_ns" and values.isna().all():
            continue  # empty bars would only push the other bars aside
        figure.add_bar(
            name=name,
            x=labels,
            y=[None if pd.isna(value) else float(value) for value in values],
            customdata=["" if pd.isna(value) else api.format_ns(value) for value in values],
            marker={"color": colour, "line": {"width": 0}, "pattern": {"shape": ""}},
            hovertemplate="Bucket %{x}<br><b>" + name + "</b>: %{customdata}<extra></extra>",
        )
    known = frame[["duration_ns", "exposed_ns"]].max().dropna()
    figure.update_layout(
        height=300,
        hovermode="x",  # a click anywhere in the column of a small bar selects the bar
        barmode="group",
        bargap=0.6 if len(labels) < _FEW else 0.2,
        xaxis=_bucket_axis(labels),
        yaxis=axis(float(known.max()) if len(known) else 0.0, "ns", "Time", room=1.05),
    )
    return figure


def _bucket_axis(labels: list[str]) -> dict[str, object]:
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": labels,
        "title": {"text": "Bucket, in order of flushing"},
        "showgrid": False,
        "nticks": 16,
    }
