"""Builds the charts of NCCL's rings and trees: the ranks of a communicator, and an arrow for each connected pair."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go

from commprof_dash.theme import MUTED_TEXT, SETTING_COLOURS, Scheme, template, text_on

_NAMED: Final = 64  # the largest number of ranks whose numbers fit
_ARROWS: Final = 128

Places = Mapping[int, tuple[float, float]]


def ring(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the ranks of one ring on a circle, in the order of the ring.

    Args:
        frame: The columns ``from_rank`` and ``to_rank``, one row per pair of neighbors.
    """
    return _drawn(frame, _on_a_circle(frame), scheme)


def tree(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return one tree, with the root at the top.

    Args:
        frame: The columns ``from_rank`` (parent) and ``to_rank`` (child).
    """
    return _drawn(frame, _in_layers(frame), scheme)


def _on_a_circle(frame: pd.DataFrame) -> Places:
    following = dict(zip(frame["from_rank"], frame["to_rank"], strict=True))
    ranks = sorted(set(frame["from_rank"]) | set(frame["to_rank"]))
    order: list[int] = []
    for start in ranks:  # a ring with missing log lines consists of several parts
        rank = start
        while rank not in order:
            order.append(rank)
            rank = following.get(rank, rank)
    turns = [2 * math.pi * position / max(1, len(order)) for position in range(len(order))]
    return {rank: (math.sin(turn), math.cos(turn)) for rank, turn in zip(order, turns, strict=True)}


def _in_layers(frame: pd.DataFrame) -> Places:
    children: dict[int, list[int]] = {}
    for parent, child in zip(frame["from_rank"], frame["to_rank"], strict=True):
        children.setdefault(parent, []).append(child)
    below = set(frame["to_rank"])
    ranks = sorted(set(frame["from_rank"]) | below)
    layer, depth = [rank for rank in ranks if rank not in below] or ranks[:1], 0
    places: dict[int, tuple[float, float]] = {}
    while layer:
        for position, rank in enumerate(layer):
            places[rank] = ((position + 0.5) / len(layer), -float(depth))
        layer = [
            child
            for child in dict.fromkeys(c for rank in layer for c in children.get(rank, []))
            if child not in places
        ]
        depth += 1
    for position, rank in enumerate(rank for rank in ranks if rank not in places):
        places[rank] = (float(position), -float(depth))
    return places


def _drawn(frame: pd.DataFrame, places: Places, scheme: Scheme) -> go.Figure:
    figure = go.Figure(layout={"template": template(scheme)})
    xs: list[float | None] = []
    ys: list[float | None] = []
    arrows: list[dict[str, Any]] = []
    for first, second in zip(frame["from_rank"], frame["to_rank"], strict=True):
        (x, y), (to_x, to_y) = places[first], places[second]
        xs += [x, to_x, None]
        ys += [y, to_y, None]
        arrows.append(_arrow(x, y, to_x, to_y, scheme))
    colour = SETTING_COLOURS[0]
    named = len(places) <= _NAMED
    figure.add_scatter(
        name="sends to",
        mode="lines",
        x=xs,
        y=ys,
        hoverinfo="skip",
        line={"color": MUTED_TEXT[scheme], "width": 1.5},
    )
    figure.add_scatter(
        name="rank",
        mode="markers+text" if named else "markers",
        x=[place[0] for place in places.values()],
        y=[place[1] for place in places.values()],
        text=[str(rank) for rank in places],
        textfont={"color": text_on(colour), "size": 12},
        marker={"color": colour, "size": 26 if named else 7},
        line={"color": colour},
        hovertemplate="Rank %{text}<extra></extra>",
    )
    hidden = {"visible": False, "showgrid": False, "zeroline": False}
    figure.update_layout(
        height=340,
        margin={"l": 24, "r": 24, "t": 24, "b": 24},
        xaxis=hidden,
        yaxis=hidden,
        annotations=arrows if len(arrows) <= _ARROWS else [],
    )
    return figure


def _arrow(x: float, y: float, to_x: float, to_y: float, scheme: Scheme) -> dict[str, Any]:
    """Return the head of an arrow in the middle of a line."""
    return {
        "x": x + 0.56 * (to_x - x),
        "y": y + 0.56 * (to_y - y),
        "ax": x + 0.5 * (to_x - x),
        "ay": y + 0.5 * (to_y - y),
        "xref": "x",
        "yref": "y",
        "axref": "x",
        "ayref": "y",
        "text": "",
        "showarrow": True,
        "arrowhead": 2,
        "arrowsize": 1.4,
        "arrowwidth": 1.5,
        "arrowcolor": MUTED_TEXT[scheme],
    }
