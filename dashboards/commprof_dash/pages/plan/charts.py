"""Builds the figures of the page Plan: traffic, memory and time over the number of ranks, and messages by size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts.axis_ticks import axis
from commprof_dash.charts.labels import escape
from commprof_dash.charts.listed import listed
from commprof_dash.measures import format_count
from commprof_dash.theme import EXPOSED_COLOUR, KIND_COLOURS, STEP_COLOUR, TEXT, Scheme, template

_HEIGHT: Final = 320
_ROOM: Final = 0.08  # the room beside the first and last number of ranks, in powers of ten
_KILO: Final = 10  # the exponent of the power of two that is written as 1K, so that labels fit on a phone
_MOST_RANKS_TICKS: Final = 8
_HATCHES: Final = ("", "/", "x", ".")  # the hatches of kinds if there are more kinds than colors


def traffic_over_worlds(frame: pd.DataFrame, world: int, scheme: Scheme) -> go.Figure:
    """Return the wire bytes of a rank per step over the number of ranks, stacked by purpose.

    Args:
        frame: The columns ``world``, ``purpose``, ``wire_bytes``; one row for each world and purpose.
        world: The number of ranks that a line marks.
    """
    return _stacked(frame, "purpose", "wire_bytes", world, "Wire bytes per rank and step", scheme)


def memory_over_worlds(frame: pd.DataFrame, world: int, capacity: int | None, scheme: Scheme) -> go.Figure:
    """Return the bytes on the device of a rank over the number of ranks, stacked by kind.

    Args:
        frame: The columns of the memory of ``data.Curves``; one row for each world and kind.
        world: The number of ranks that a line marks.
        capacity: The memory of a device in bytes, marked by another line; None if it is not known.
    """
    peaks = frame[frame["peak_bytes"].notna()].drop_duplicates("world").sort_values("world")
    highest = float(peaks["peak_bytes"].max()) if len(peaks) else 0.0
    figure = _stacked(frame, "kind", "device_bytes", world, "Device memory of a rank", scheme, highest)
    if len(peaks):
        texts = [
            f"{api.format_bytes(most)}, in the {phase}"
            for most, phase in zip(peaks["peak_bytes"], peaks["peak_phase"], strict=True)
        ]
        figure.add_scatter(
            name="peak, alive at once",
            mode="lines",
            x=listed(peaks["world"].tolist()),
            y=listed(peaks["peak_bytes"].astype(int).tolist()),
            customdata=listed(texts),
            line={"color": TEXT[scheme], "width": 2},
            hovertemplate="peak: <b>%{customdata}</b><extra></extra>",
        )
    if capacity is not None:
        worlds = sorted(set(frame["world"]))
        figure.add_scatter(
            name="memory of a device",
            mode="lines",
            x=listed([worlds[0], worlds[-1]]),
            y=listed([capacity, capacity]),
            line={"color": TEXT[scheme], "width": 1.5, "dash": "dash"},
            hovertemplate=f"memory of a device: <b>{api.format_bytes(capacity)}</b><extra></extra>",
        )
    return figure


def times_over_worlds(frame: pd.DataFrame, world: int, is_narrowed: bool, scheme: Scheme) -> go.Figure:
    """Return the time of messages, and the bounds of a step if they are known, over the number of ranks.

    Args:
        frame: The columns ``world``, ``communication_ns``, ``step_least_ns``, ``step_most_ns``.
        world: The number of ranks that a line marks.
        is_narrowed: Whether the bounds are closer than "all overlapped" and "nothing overlapped".
    """
    figure = go.Figure(layout={"template": template(scheme)})
    least, most = (
        ("step, at least", "step, at most")
        if is_narrowed
        else ("step, maximum overlap", "step, nothing overlapped")
    )
    looks = {
        "communication_ns": ("communication", EXPOSED_COLOUR, "solid"),
        "step_least_ns": (least, STEP_COLOUR, "dash"),
        "step_most_ns": (most, STEP_COLOUR, "solid"),
    }
    shown = [name for name in looks if frame[name].notna().any()]
    for column in shown:
        name, colour, dash = looks[column]
        values = frame[column].astype(float).tolist()
        figure.add_scatter(
            name=name,
            mode="lines",
            x=listed(frame["world"].tolist()),
            y=listed(values),
            customdata=listed(map(api.format_ns, values)),
            line={"color": colour, "width": 2, "dash": dash},
            hovertemplate=f"{name}: <b>%{{customdata}}</b><extra></extra>",
        )
    highest = float(frame[shown].max().max()) if shown else 0.0
    _finish(figure, frame["world"].tolist(), world, axis(highest, "ns", "Time of a step", room=1.06), scheme)
    return figure


def by_size(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the messages of a step by the size of their payload.

    Args:
        frame: The columns ``from_bytes``, ``to_bytes``, ``messages``; one row for each size that occurs.
    """
    figure = go.Figure(layout={"template": template(scheme)})
    names = [_power(int(low)) for low in frame["from_bytes"]]
    figure.add_bar(
        name="messages",
        x=names,
        y=frame["messages"].tolist(),
        customdata=[
            [api.format_bytes(low), api.format_bytes(high), format_count(number)]
            for low, high, number in frame[["from_bytes", "to_bytes", "messages"]].itertuples(index=False)
        ],
        text=[format_count(number) for number in frame["messages"]],
        textposition="outside",
        cliponaxis=False,
        marker={"color": STEP_COLOUR},
        hovertemplate="%{customdata[0]} to %{customdata[1]}: <b>%{customdata[2]}</b> messages<extra></extra>",
    )
    highest = float(frame["messages"].max()) if len(frame) else 0.0
    figure.update_layout(
        height=_HEIGHT,
        bargap=0.25,
        xaxis={"title": {"text": "Payload from (powers of two)"}, "type": "category", "showgrid": False},
        yaxis=axis(highest, "", "Messages per step", room=1.12),
    )
    return figure


def _stacked(
    frame: pd.DataFrame,
    series: str,
    column: str,
    world: int,
    title: str,
    scheme: Scheme,
    least: float = 0.0,
) -> go.Figure:
    """Return a stacked chart over the number of ranks. The vertical axis ends at ``least`` or above."""
    figure = go.Figure(layout={"template": template(scheme)})
    for number, name in enumerate(dict.fromkeys(frame[series])):
        part = frame[frame[series] == name].sort_values("world")
        values = part[column].tolist()
        colour = KIND_COLOURS[number % len(KIND_COLOURS)]
        hatch = _HATCHES[number // len(KIND_COLOURS) % len(_HATCHES)]
        figure.add_scatter(
            name=escape(name),
            mode="lines",
            stackgroup="all",
            x=listed(part["world"].tolist()),
            y=listed(values),
            customdata=listed(map(api.format_bytes, values)),
            line={"color": colour, "width": 1},
            fillcolor=colour,
            fillpattern={"shape": hatch, "fillmode": "overlay", "fgcolor": "#ffffff", "fgopacity": 0.4},
            hovertemplate=f"{escape(name)}: <b>%{{customdata}}</b><extra></extra>",
        )
    highest = float(frame.groupby("world")[column].sum().max()) if len(frame) else 0.0
    _finish(
        figure, frame["world"].tolist(), world, axis(max(highest, least), "bytes", title, room=1.06), scheme
    )
    return figure


def _finish(
    figure: go.Figure, worlds: Sequence[int], world: int, vertical: dict[str, Any], scheme: Scheme
) -> None:
    figure.update_layout(
        height=_HEIGHT,
        margin={"l": 8, "r": 24, "t": 8, "b": 8},  # plotly hides labels that the edge would cut off
        hovermode="x unified",
        xaxis=_ranks_axis(min(worlds, default=1), max(worlds, default=2)),
        yaxis=vertical,
    )
    if worlds and min(worlds) <= world <= max(worlds):
        figure.add_vline(x=world, line={"color": TEXT[scheme], "width": 1, "dash": "dot"})


def _ranks_axis(first: int, last: int) -> dict[str, Any]:
    """Return a logarithmic axis of numbers of ranks, from one power of two to another."""
    low, high = first.bit_length() - 1, (last - 1).bit_length()
    step = -(-(high - low + 1) // _MOST_RANKS_TICKS)
    powers = range(low, high + 1, step)
    return {
        "type": "log",
        "range": [math.log10(1 << low) - _ROOM, math.log10(1 << max(high, low + 1)) + _ROOM],
        "tickvals": [1 << power for power in powers],
        "ticktext": [str(1 << power) if power < _KILO else f"{1 << power - _KILO}K" for power in powers],
        "title": {"text": "Ranks, logarithmic (1K = 1,024)"},
        "hoverformat": ",d",
    }


def _power(num_bytes: int) -> str:
    """Return a power of two as ``16 MiB``, which format_bytes would write with decimals."""
    text = api.format_bytes(num_bytes)
    number, _, unit = text.partition(" ")
    return f"{float(number):g} {unit}"
