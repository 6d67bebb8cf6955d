"""Builds the alignment chart: the number of records and NCCL lines of each rank in each state."""

from __future__ import annotations

from typing import Final

import pandas as pd
import plotly.graph_objects as go

from commprof_dash.charts.axis_ticks import axis
from commprof_dash.charts.rank_charts import rank_axis
from commprof_dash.charts.series import hatched
from commprof_dash.theme import OP_COLOURS, OTHER_COLOUR, SETTING_COLOURS, Scheme, template

# The order of the stack, with "matched" at the bottom. Hatches also distinguish the states.
STATES: Final = {
    "matched": (OP_COLOURS["reduce_scatter"], ""),
    "missing": (SETTING_COLOURS[1], "/"),
    "extra": (SETTING_COLOURS[3], "x"),
    "ambiguous": (SETTING_COLOURS[4], "."),
    "torn": (OTHER_COLOUR, "-"),
}


def states(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the number of rows in each state as stacked bars, one bar per rank.

    Args:
        frame: The columns ``rank``, ``state``, ``lines``; several rows of a rank and state are summed.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    known = frame[frame["rank"].notna()]
    sums = known.groupby(["rank", "state"], as_index=False)["lines"].sum()
    for state, (colour, hatch) in STATES.items():
        part = sums[sums["state"] == state]
        if part.empty:
            continue
        figure.add_bar(
            name=state,
            x=part["rank"].astype(int).tolist(),
            y=part["lines"].tolist(),
            marker=hatched(colour, hatch, 0.4),
            hovertemplate="Rank %{x}<br><b>" + state + "</b>: %{y:,}<extra></extra>",
        )
    highest = float(sums.groupby("rank")["lines"].sum().max()) if len(sums) else 0.0
    figure.update_layout(
        height=300,
        barmode="stack",
        bargap=0.4,
        xaxis=rank_axis(known["rank"].astype(int)),
        yaxis=axis(highest, "", "Records and lines", room=1.05),
    )
    return figure
