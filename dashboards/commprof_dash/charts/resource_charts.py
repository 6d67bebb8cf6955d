"""Builds the chart of a run's resources over its steps: memory above, shares of time below."""

from __future__ import annotations

from typing import Final

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts.axis_ticks import axis, step_ticks
from commprof_dash.theme import EXPOSED_COLOUR, OTHER_COLOUR, SETTING_COLOURS, STEP_COLOUR, Scheme, template

_MEMORY: Final = (
    ("rss_bytes", "resident memory, largest rank", STEP_COLOUR),
    ("device_bytes", "device memory, largest rank", SETTING_COLOURS[0]),
)
_SHARES: Final = (
    ("cores", "cores busy, mean rank", OTHER_COLOUR),
    ("gpu_share", "GPU utilisation", SETTING_COLOURS[2]),
    ("communication_share", "exposed communication", EXPOSED_COLOUR),
)
_BOUNDS: Final = (  # the bounds that are drawn if the value is not known
    ("communication_share_low", "exposed communication, at least", EXPOSED_COLOUR),
    ("communication_share_high", "exposed communication, at most", EXPOSED_COLOUR),
)


def over_steps(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the memory of the largest rank, and below it processors and the share of communication, by training step.

    If no values of one part are known, the other part uses the whole height.

    Args:
        frame: The columns of ``api.resource_use``.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    highest: dict[str, float | None] = {"y": None, "y2": None}  # None: no value is known
    bounds = () if frame["communication_share"].notna().any() else _BOUNDS
    for at, drawn in (("y", _MEMORY), ("y2", (*_SHARES, *bounds))):
        for column, name, colour in drawn:
            part = frame[frame[column].notna()]
            if part.empty:
                continue
            values = part[column].astype(float).tolist()
            highest[at] = max(highest[at] or 0.0, *values)
            figure.add_scatter(
                name=name,
                mode="lines+markers" if len(part) <= 60 else "lines",
                x=part["step"].tolist(),
                y=values,
                yaxis=at,
                customdata=[_text(column, value) for value in values],
                line={"color": colour, "width": 2},
                marker={"size": 6},
                hovertemplate="Step %{x}<br><b>" + name + "</b>: %{customdata}<extra></extra>",
            )
    both = highest["y"] is not None and highest["y2"] is not None
    full_height, none = [0.0, 1.0], {"visible": False}
    memory = axis(highest["y"] or 0.0, "bytes", "Memory", room=1.1) | {
        "domain": [0.56, 1] if both else full_height
    }
    shares = axis(highest["y2"] or 0.0, "", "Cores, share of time", room=1.1)
    figure.update_layout(
        height=380 if both else 220,
        xaxis={
            "title": {"text": "Training step"}, "showgrid": False, "anchor": "y" if highest["y2"] is None else "y2",
            **step_ticks(frame["step"]),
        },
        yaxis=none if highest["y"] is None else memory,
        yaxis2=none if highest["y2"] is None else shares | {"domain": [0, 0.44] if both else full_height},
    )  # fmt: skip
    return figure


def _text(column: str, value: float) -> str:
    if column.endswith("_bytes"):
        return api.format_bytes(value)
    return f"{value:.2f}" if column == "cores" else f"{100 * value:.1f} %"
