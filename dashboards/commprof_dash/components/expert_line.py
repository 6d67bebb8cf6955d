"""Describes the load of experts in one line, for the pages that show the load or link to it."""

from __future__ import annotations

from dash import dcc
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash import address
from commprof_dash.components import messages
from commprof_dash.data import Runs


def expert_line(runs: Runs, name: str, link: bool) -> list[Component]:
    """Return a line about the load of the experts of run ``name``; empty without experts.

    The line states whether the load is even and which share of the choices was dropped.

    Args:
        runs: The runs.
        name: The name of the run.
        link: Whether the line ends with a link to the page with the details.
    """
    summary: api.ExpertSummary | None = runs.of_run("expert_summary", name, api.expert_summary)
    layers = [] if summary is None else [each for each in summary.layers if each.imbalance is not None]
    if summary is None or not layers:
        return []
    worst = layers[0]
    uneven = (worst.imbalance or 0.0) >= api.UNEVEN_LOAD
    drops = summary.dropped_share is not None and summary.dropped_share >= api.NOTABLE_DROPS
    text = f"{worst.layer}: the expert that most tokens chose has {worst.imbalance:.2f} times the mean (median of the steps)"
    if len(layers) > 1:
        text += f", the most uneven of {len(layers)} layers"
    text += "."
    if summary.dropped_share is not None:
        text += f" {summary.dropped_share:.1%} of the choices were dropped."
    shown = messages.line(
        "Experts are unevenly loaded"
        if uneven
        else "Tokens are dropped"
        if drops
        else "Experts are evenly loaded",
        f"{text} " if link else text,
        "warning" if uneven or drops else "good",
    )
    if link:
        shown.children.append(dcc.Link("Load by expert and step", href=address.link("/matrix", run=[name])))
    return [shown]
