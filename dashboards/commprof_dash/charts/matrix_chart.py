"""Builds the matrix charts.

They show the bytes between pairs of ranks on a logarithmic color scale, and the bytes that each rank receives as
owner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof.schema import Op
from commprof_dash.charts.axis_ticks import axis
from commprof_dash.charts.rank_charts import rank_axis
from commprof_dash.charts.sketch import Sketch
from commprof_dash.theme import OP_COLOURS, PAPER, SETTING_COLOURS, TEXT, Scheme

_MOST_TICKS: Final = 12
# The largest number of long texts like 240-243 side by side. More texts would be rotated and would cover the
# title.
_MOST_LONG_TICKS: Final = 5
_LONG: Final = 4  # Texts of more characters are long.
_FAINTEST: Final = 0.16  # the share of the color in the smallest cell that is not empty
# The distance of ticks as a part of the color bar, so that their texts do not overlap.
_TICKS_APART: Final = 0.25
_EDGE: Final = 0.06
# The largest number of ranks or blocks along a side for which a cell has room for its bytes.
_MOST_WRITTEN: Final = 16
# The largest number along a side for which cells are square. The texts of more cells need the full width.
_SQUARE: Final = 4


def rank_text(first: int, width: int, ranks: int) -> str:
    """Return the ranks of a row or column as text: ``3``, or ``16-31``."""
    return f"{first}" if width == 1 else f"{first}-{min(first + width, ranks) - 1}"


def heat(
    frame: pd.DataFrame,
    column: str,
    title: str,
    op: str | None,
    scheme: Scheme,
    hosts: Mapping[int, str] | None = None,
) -> go.Figure:
    """Return a cell for each sender (row) and receiver (column). Cells with 0 bytes are empty.

    If there are few cells, each shows its bytes.

    Args:
        frame: The columns ``sender``, ``receiver`` and ``column``, in bytes; ``attrs`` contains ``ranks`` and
            ``ranks_per_cell``.
        title: The title of the color bar, which is the name of the measure.
        op: The operation whose color is used; None for several operations.
        hosts: The host of each rank. If there are several hosts, a frame surrounds neighboring ranks of the same
            host.
    """
    ranks, width = int(frame.attrs["ranks"]), int(frame.attrs["ranks_per_cell"])
    firsts = _firsts(frame, ranks, width)
    place = {first: position for position, first in enumerate(firsts)}
    names = [rank_text(first, width, ranks) for first in firsts]
    size = len(firsts)
    sizes: list[list[float | None]] = [[None] * size for _ in firsts]
    for sender, receiver, value in zip(frame["sender"], frame["receiver"], frame[column], strict=True):
        if value > 0:
            sizes[place[sender]][place[receiver]] = float(value)
    # The bytes of two pairs may differ by orders of magnitude, so the color shows their logarithm. If they
    # differ by less than a factor of two, the scale begins at half of them. Otherwise, all cells would have
    # the faintest color.
    positive = [value for row in sizes for value in row if value]
    least, high = (math.log2(min(positive)), math.log2(max(positive))) if positive else (0.0, 1.0)
    low = least - 1 if high - least < 1 else least
    colour = OP_COLOURS.get(op or "", SETTING_COLOURS[0])
    figure = Sketch(scheme)
    figure.add_heatmap(
        name=title,
        z=[[None if value is None else math.log2(value) for value in row] for row in sizes],
        customdata=[
            [_hover(names[i], names[j], value) for j, value in enumerate(row)] for i, row in enumerate(sizes)
        ],
        text=[["" if value is None else api.format_bytes(value) for value in row] for row in sizes],
        texttemplate="%{text}" if size <= _MOST_WRITTEN else None,
        zmin=low,
        zmax=high,
        colorscale=[[0, mixed(PAPER[scheme], colour, _FAINTEST)], [1, colour]],
        colorbar=_colour_bar(low, least, high, title),
        xgap=1 if size <= 64 else 0,
        ygap=1 if size <= 64 else 0,
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
    )
    is_long = max(map(len, names), default=0) > _LONG
    is_square = size <= _SQUARE or size > _MOST_WRITTEN
    figure.update_layout(
        shapes=_host_frames(firsts, width, hosts or {}, scheme),
        height=500,
        margin={"l": 8, "r": 8, "t": 8, "b": 110},
        xaxis=_ticks(names, _MOST_LONG_TICKS if is_long else _MOST_TICKS)
        | {"title": {"text": "Receiving rank"}, "constrain": "domain"},
        yaxis=_ticks(names, _MOST_TICKS)
        | {
            "title": {"text": "Sending rank"},
            "autorange": "reversed",
            "constrain": "domain",
            **({"scaleanchor": "x"} if is_square else {}),
        },
    )
    return figure.figure()


def _host_frames(
    firsts: Sequence[int], width: int, hosts: Mapping[int, str], scheme: Scheme
) -> list[dict[str, Any]]:
    """Return a frame around the cells between ranks of one host. A block with ranks of two hosts is in no frame."""
    blocks: list[str | None] = []
    for first in firsts:
        of_block = {hosts.get(rank) for rank in range(first, first + width) if rank in hosts}
        blocks.append(next(iter(of_block)) if len(of_block) == 1 else None)
    if len(set(blocks)) < 2:
        return []
    frames = []
    begin = 0
    for place in range(1, len(blocks) + 1):
        if place < len(blocks) and blocks[place] == blocks[begin]:
            continue
        if blocks[begin] is not None:
            low, high = begin - 0.5, place - 0.5
            line = {"width": 2, "color": TEXT[scheme]}
            frames.append({"type": "rect", "x0": low, "x1": high, "y0": low, "y1": high, "line": line})
        begin = place
    return frames


def received_by_owner(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the bytes that each rank receives as the owner of reduces, and the mean over the ranks as a line.

    Args:
        frame: The columns ``rank`` and ``received_bytes``.
    """
    received = frame["received_bytes"].astype(float)
    mean = float(received.mean()) if len(frame) else 0.0
    figure = Sketch(scheme)
    figure.add_bar(
        name="received as owner",
        x=frame["rank"].tolist(),
        y=received.tolist(),
        customdata=[api.format_bytes(value) for value in received],
        marker={"color": OP_COLOURS[Op.REDUCE], "line": {"width": 0}, "pattern": {"shape": ""}},
        hovertemplate="Rank %{x} receives <b>%{customdata}</b><extra></extra>",
    )
    figure.add_scatter(
        name="mean of the ranks",
        mode="lines",
        x=[float(frame["rank"].min()) - 0.5, float(frame["rank"].max()) + 0.5] if len(frame) else [],
        y=[mean, mean] if len(frame) else [],
        line={"color": OP_COLOURS[Op.BARRIER], "dash": "dash", "width": 2},
        hoverinfo="skip",
    )
    figure.update_layout(
        height=300,
        xaxis=rank_axis(frame["rank"]),
        yaxis=axis(float(received.max()) if len(frame) else 0.0, "bytes", "Wire bytes received", room=1.05),
    )
    return figure.figure()


def _firsts(frame: pd.DataFrame, ranks: int, width: int) -> list[int]:
    present = set(frame["sender"]) | set(frame["receiver"])
    # Ranks that neither send nor receive are included, too, if the ranks are numbered from 0 as usual.
    expected = set(range(0, ranks, width))
    return sorted(expected if present <= expected else present)


def _hover(sender: str, receiver: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"Rank {sender} to rank {receiver}<br><b>{api.format_bytes(value)}</b>"


def _ticks(names: Sequence[str], most: int) -> dict[str, Any]:
    every = max(1, -(-len(names) // most))
    return {
        "tickvals": list(range(0, len(names), every)),
        "ticktext": list(names[::every]),
        "showgrid": False,
        "zeroline": False,
    }


def _colour_bar(low: float, least: float, high: float, title: str) -> dict[str, Any]:
    """Return ticks at powers of two, or at the least and the most if there are fewer than two such ticks.

    All values are logarithms to base 2.
    """
    first, last = math.ceil(least), math.floor(high)
    every = max(1, -(-(last - first) // 4))
    powers = list(range(first, last + 1, every))
    values, texts = [float(power) for power in powers], [_round(2.0**power) for power in powers]
    if len(values) < 2:
        ends = [least, high] if high - least > _TICKS_APART * (high - low) else [high]
        edge = _EDGE * (high - low)  # plotly does not draw a tick at the very end
        values, texts = [min(end, high - edge) for end in ends], [_round(2.0**end) for end in ends]
    return {
        "tickvals": values,
        "ticktext": texts,
        "title": {"text": f"{title}, logarithmic scale", "side": "top", "font": {"size": 12}},
        "orientation": "h",
        "thickness": 12,
        "outlinewidth": 0,
        "y": -0.14,
        "yanchor": "top",
    }


def _round(value: float) -> str:
    return api.format_bytes(value).replace(".00 ", " ").replace(".0 ", " ")


def mixed(background: str, colour: str, share: float) -> str:
    """Return the mix of ``share`` of ``colour`` and the rest of ``background``. All colors are ``#rrggbb``."""

    def channels(text: str) -> list[int]:
        return [int(text[i : i + 2], 16) for i in (1, 3, 5)]

    mixed = [round(b + share * (c - b)) for b, c in zip(channels(background), channels(colour), strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)
