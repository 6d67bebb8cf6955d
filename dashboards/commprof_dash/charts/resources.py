"""What a run used over its steps: memory above, shares of time below, one over the other."""

from __future__ import annotations

from typing import Final

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts.axes import axis, step_ticks
from commprof_dash.theme import EXPOSED_COLOUR, OTHER_COLOUR, SETTING_COLOURS, STEP_COLOUR, Scheme, template

_MEMORY: Final = (
    ("rss_bytes", "resident memory, largest rank", STEP_COLOUR),
    ("device_bytes", "device memory, largest rank", SETTING_COLOURS[0]),
)
_SHARES: Final = (
    ("cores", "cores busy, mean rank", OTHER_COLOUR),
    ("gpu_share", "GPU utilisation", SETTING_COLOURS[2]),
    ("communication_share", "stood still for collectives", EXPOSED_COLOUR),
)


def over_steps(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Memory of the largest rank, and below it processors and the share of communication, by training step.

    Args:
        frame: columns of ``api.resource_use``.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    highest = {"y": 0.0, "y2": 0.0}
    for at, drawn in (("y", _MEMORY), ("y2", _SHARES)):
        for column, name, colour in drawn:
            part = frame[frame[column].notna()]
            if part.empty:
                continue
            values = part[column].astype(float).tolist()
            highest[at] = max(highest[at], *values)
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
    figure.update_layout(
        height=380,
        xaxis={
            "title": {"text": "Training step"}, "showgrid": False, "anchor": "y2", **step_ticks(frame["step"]),
        },
        yaxis={**axis(highest["y"], "bytes", "Memory", room=1.1), "domain": [0.56, 1]},
        yaxis2={
            **axis(highest["y2"], "", "Cores, share of time", room=1.1), "domain": [0, 0.44],
        },
    )  # fmt: skip
    return figure


def _text(column: str, value: float) -> str:
    if column.endswith("_bytes"):
        return api.format_bytes(value)
    return f"{value:.2f}" if column == "cores" else f"{100 * value:.1f} %"
