"""Builds the logarithmic chart of bandwidth against size: measured bandwidth, the machine's ceiling, and outliers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof.schema import Op
from commprof_dash.charts.axis_ticks import log_axis
from commprof_dash.charts.labels import escape
from commprof_dash.charts.listed import listed
from commprof_dash.charts.sketch import Sketch
from commprof_dash.theme import EXPOSED_COLOUR, OP_COLOURS, OTHER_COLOUR, TEXT, Scheme

_SYMBOLS: Final = ("circle", "square", "triangle-up", "diamond", "cross", "star", "hexagon", "pentagon")
_DASHES: Final = {"reached": "solid", "ceiling": "dash"}


class Rate(NamedTuple):
    """One of the two bandwidths that nccl-tests defines."""

    key: str  # the value in the address
    name: str
    definition: str

    def of(self, payload_bytes: float, time_ns: float, factor: float) -> float:
        """Return the bandwidth in bytes/s. ``factor`` is the factor of the bus bandwidth."""
        return payload_bytes / time_ns * 1e9 * (factor if self is BUSBW else 1.0)


BUSBW: Final = Rate(
    "busbw", "Bus bandwidth", "payload over time, times the factor of nccl-tests: the bandwidth of a link"
)
ALGBW: Final = Rate("algbw", "Algorithm bandwidth", "payload over time: the bandwidth that the program sees")
RATES: Final = {rate.key: rate for rate in (BUSBW, ALGBW)}


def format_rate(value: float) -> str:
    """Return a rate as text: ``1.50 GiB/s``."""
    return f"{api.format_bytes(value)}/s"


def against_size(
    sizes: pd.DataFrame, strange: pd.DataFrame, curve: pd.DataFrame, rate: Rate, scheme: Scheme
) -> go.Figure:
    """Return a line per operation and group, dashed lines for ceilings, and marks for values that the averages exclude.

    Args:
        sizes: The rows of ``api.bandwidth`` that have a time.
        strange: The rows of ``api.bandwidth_times`` that are outliers or impossible.
        curve: The rows of ``api.ceiling``.
    """
    figure = Sketch(scheme)
    groups = list(dict.fromkeys(sizes["group_ranks"]))
    for (op, group), part in sizes.groupby(["op", "group_ranks"], sort=False):
        _add_reached(figure, part, str(op), str(group), rate, groups)
    for (op, group_size), part in curve.groupby(["op", "group_size"], sort=False) if len(curve) else ():
        _add_ceiling(figure, part, str(op), str(group_size), rate)
    slow = strange[strange["verdict"].isin(["slow", "fast"])]
    _add_marks(figure, slow, "outlier, not in the average", "x-thin-open", TEXT[scheme], rate)
    odd = strange[strange["verdict"] == "impossible"]
    _add_marks(figure, odd, "impossible, not in the average", "diamond-open", EXPOSED_COLOUR, rate)
    figure.update_layout(
        height=440,
        xaxis=log_axis(*_ends(value for trace in figure.traces for value in trace["x"]), "Payload"),
        yaxis=log_axis(*_ends(value for trace in figure.traces for value in trace["y"]), rate.name, "/s"),
    )
    return figure.figure()


def colour_of(op: str) -> str:
    """Return the color of an operation. Messages have the color of sends."""
    return OP_COLOURS.get(Op.SEND if op == "send_recv" else op, OTHER_COLOUR)


def _add_reached(
    figure: Sketch, part: pd.DataFrame, op: str, group: str, rate: Rate, groups: list[str]
) -> None:
    part = part.sort_values("payload_bytes")
    name = op if len(groups) < 2 else f"{op}, ranks {group}"
    texts = [
        f"{escape(name)}<br>{api.format_bytes(row['payload_bytes'])} in {api.format_ns(row['time_ns'])}, median of "
        f"{row['timed']:,}<br><b>{format_rate(row[_column(rate)])}</b>{_share(row['ceiling_share'])}"
        for row in part.to_dict("records")
    ]
    figure.add_scatter(
        name=escape(name),
        mode="lines+markers",
        x=listed(part["payload_bytes"].tolist()),
        y=listed(part[_column(rate)].tolist()),
        customdata=listed(texts),
        line={"color": colour_of(op), "width": 2, "dash": _DASHES["reached"]},
        marker={"size": 8, "symbol": _SYMBOLS[groups.index(group) % len(_SYMBOLS)]},
        hovertemplate="%{customdata}<extra></extra>",
    )


def _add_ceiling(figure: Sketch, part: pd.DataFrame, op: str, group_size: str, rate: Rate) -> None:
    part = part[part["time_ns"].notna()].sort_values("payload_bytes")
    if part.empty:
        return
    values = [
        row["busbw_bytes_per_s"] if rate is BUSBW else rate.of(row["payload_bytes"], row["time_ns"], 1.0)
        for row in part.to_dict("records")
    ]
    figure.add_scatter(
        name=f"{escape(op)}: ceiling, {group_size} ranks",
        mode="lines",
        x=part["payload_bytes"].tolist(),
        y=values,
        customdata=[api.format_ns(value) for value in part["time_ns"]],
        line={"color": colour_of(op), "width": 1.5, "dash": _DASHES["ceiling"]},
        hovertemplate=f"Ceiling of {escape(op)}, {group_size} ranks: " + "%{customdata}<extra></extra>",
    )


def _add_marks(figure: Sketch, part: pd.DataFrame, name: str, symbol: str, colour: str, rate: Rate) -> None:
    # A logarithmic axis cannot show a bandwidth of 0; the table shows it.
    part = part[part[_column(rate)] > 0]
    if part.empty:
        return
    texts = [
        f"{escape(row['op'])}, ranks {escape(row['group_ranks'])}, step {row['step']}<br>{row['verdict']}: "
        f"{api.format_bytes(row['payload_bytes'])} in {api.format_ns(row['time_ns'])}"
        for row in part.to_dict("records")
    ]
    figure.add_scatter(
        name=name,
        mode="markers",
        x=listed(part["payload_bytes"].tolist()),
        y=listed(part[_column(rate)].tolist()),
        customdata=listed(texts),
        marker={"symbol": symbol, "size": 9, "color": colour, "line": {"width": 1.5, "color": colour}},
        line={"color": colour},
        hovertemplate="%{customdata}<extra></extra>",
    )


def _column(rate: Rate) -> str:
    return f"{rate.key}_bytes_per_s"


def _share(share: Any) -> str:
    return "" if pd.isna(share) else f", {100 * share:.0f} % of the ceiling"


def _ends(values: Iterable[float]) -> tuple[float, float]:
    positive = [float(value) for value in values if value > 0]
    return (min(positive), max(positive)) if positive else (1.0, 2.0)
