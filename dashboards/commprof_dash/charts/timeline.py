"""The timeline: a bar for each record, or, where they are too many, how busy each rank was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof.schema import OPS
from commprof_dash.charts.axes import step_size
from commprof_dash.charts.labels import escape
from commprof_dash.charts.series import marker, series_in_order, with_series
from commprof_dash.theme import (
    EXPOSED_COLOUR,
    GRID,
    MUTED_TEXT,
    OP_COLOURS,
    OTHER_COLOUR,
    PAPER,
    TEXT,
    Scheme,
    template,
)

PHASE_COLOURS: Final[dict[str, str]] = {
    "init": "#8a9199",
    "forward": "#74a7d8",
    "backward": "#d9a441",
    "optimizer": "#7fb069",
    "checkpoint": "#a58bd0",
    "other": "#8a9199",
}
HELD: Final = "program stood still"
_UNITS: Final = ((1, "ns"), (1_000, "us"), (1_000_000, "ms"), (1_000_000_000, "s"))
_STRIP: Final = 34  # pixels above the ranks: steps and phases
_LEVEL: Final = 13  # pixels of a level of a lane
_FEWEST_PIXELS: Final = 26  # of a rank
_MOST_HEIGHT: Final = 1100
_NAMED: Final = 0.13  # part of the width from which on a step has room for its name, at 400 pixels too,
_NUMBERED: Final = 0.045  # and for its number


class Row(NamedTuple):
    """Where the records of one rank stand: from ``top`` downwards, in levels of 1."""

    rank: int
    top: float
    height: float


def figure(
    shown: api.Timeline, scheme: Scheme, selected: Sequence[tuple[int, int, int, int]] = ()
) -> go.Figure:
    """The figure of a window of time; the x axis is in nanoseconds since the run began.

    Args:
        selected: records (rank, attempt, pid, seq) that are outlined: the same collective on its ranks.
    """
    drawn = go.Figure(layout={"template": template(scheme)})
    origin = shown.run_begin_ns
    if shown.bars is not None:
        rows = rows_of(shown.bars, shown.ranks)
        _draw_bars(drawn, shown.bars, rows, origin, scheme, set(selected))
    else:
        assert shown.density is not None
        rows = [Row(rank, 2.0 * place, 1.7) for place, rank in enumerate(shown.ranks)]
        _draw_density(drawn, shown.density, rows, origin, scheme)
    depth = rows[-1].top + rows[-1].height if rows else 1.0
    height = _height(rows, depth)
    begin, end = shown.begin_ns - origin, shown.end_ns - origin
    values, texts = time_ticks(begin, end)
    strip = _STRIP / height
    drawn.update_layout(
        height=height,
        barmode="overlay",
        bargap=0,
        margin={"t": 24},
        dragmode="zoom",
        hovermode="closest",
        shapes=_bands(shown.bands, origin, begin, end, scheme, strip),
        annotations=_names(shown.bands, origin, begin, end, scheme),
        xaxis={
            "range": [begin, end],
            "tickvals": values,
            "ticktext": texts,
            "title": {"text": "Time since the first record"},
            "fixedrange": False,
            "zeroline": False,
        },
        yaxis={
            "range": [depth + 0.15, -0.15],
            "domain": [0, 1 - strip],
            "tickvals": [row.top + row.height / 2 for row in rows],
            "ticktext": [f"rank {row.rank}" for row in rows]
            if len(rows) <= 64
            else [str(r.rank) for r in rows],
            "ticklen": 6,
            "tickcolor": "rgba(0,0,0,0)",
            "ticks": "outside",
            "showgrid": False,
            "zeroline": False,
        },
    )
    return drawn


def _height(rows: Sequence[Row], depth: float) -> int:
    per_rank = max(8, _FEWEST_PIXELS if len(rows) <= 32 else _MOST_HEIGHT // max(1, len(rows)))
    wanted = max(_LEVEL * depth, per_rank * len(rows))
    return round(max(220, min(_MOST_HEIGHT, wanted + _STRIP + 60)))


def rows_of(bars: pd.DataFrame, ranks: Sequence[int]) -> list[Row]:
    """A row for each rank: as many levels as its lanes have in the window, and a little room below."""
    held: dict[int, float] = {}
    for rank, _, count in _lane_heights(bars):
        held[rank] = held.get(rank, 0.0) + count
    rows, top = [], 0.0
    for rank in ranks:
        height = max(1.0, held.get(rank, 0.0))
        rows.append(Row(rank, top, height))
        top += height + 0.6
    return rows


def _draw_bars(
    drawn: go.Figure,
    bars: pd.DataFrame,
    rows: Sequence[Row],
    origin: int,
    scheme: Scheme,
    selected: set[tuple[int, int, int, int]],
) -> None:
    frame = with_series(bars).assign(place=places(bars, rows), text=hover_texts(bars, origin))
    for one in series_in_order(frame["series"]):
        part = frame[frame["series"] == one.name]
        looks = marker(one) | {"line": {"width": 0.6, "color": one.colour}}
        drawn.add_bar(name=one.name, **_spans(part, "begin_ns", "end_ns", origin), marker=looks)
        drawn.data[-1].update(
            customdata=list(zip(map(list, _keys(part)), part["text"], strict=True)),
            hovertemplate="%{customdata[1]}<extra></extra>",
        )
    held = frame[frame["exposed_end_ns"].notna()]
    if len(held):
        pattern = {"shape": "/", "size": 6, "solidity": 0.2, "fgcolor": TEXT[scheme], "fgopacity": 0.6}
        drawn.add_bar(
            name=HELD,
            **_spans(held, "exposed_begin_ns", "exposed_end_ns", origin),
            marker={
                "color": "rgba(0,0,0,0)",
                "line": {"width": 1.2, "color": EXPOSED_COLOUR},
                "pattern": pattern | {"fillmode": "overlay"},
            },
            hoverinfo="skip",
        )
    outlined = frame[[tuple(key) in selected for key in _keys(frame)]] if selected else frame.iloc[:0]
    if len(outlined):
        drawn.add_bar(
            name="same collective",
            **_spans(outlined, "begin_ns", "end_ns", origin),
            marker={"color": "rgba(0,0,0,0)", "line": {"width": 2.5, "color": TEXT[scheme]}},
            hoverinfo="skip",
        )


def _spans(part: pd.DataFrame, begin: str, end: str, origin: int) -> dict[str, Any]:
    return {
        "orientation": "h",
        "base": [float(value - origin) for value in part[begin]],
        "x": [float(b - a) for a, b in zip(part[begin], part[end], strict=True)],
        "y": part["place"].tolist(),
        "width": 0.86,
    }


def _keys(part: pd.DataFrame) -> list[tuple[int, int, int, int]]:
    return list(zip(*(part[name].tolist() for name in ("rank", "attempt", "pid", "seq")), strict=True))


def places(bars: pd.DataFrame, rows: Sequence[Row]) -> list[float]:
    """Where each bar stands, from the top: by rank, its lane and its level."""
    first: dict[tuple[int, int], float] = {}
    tops = {row.rank: row.top for row in rows}
    for rank, lane, count in _lane_heights(bars):
        first[rank, lane] = tops[rank]
        tops[rank] += count
    return [
        first[rank, lane] + level + 0.5
        for rank, lane, level in zip(bars["rank"], bars["lane"], bars["level"], strict=True)
    ]


def _lane_heights(bars: pd.DataFrame) -> list[tuple[int, int, float]]:
    """Rank, lane and number of levels of each lane, in order."""
    highest = bars.groupby(["rank", "lane"], as_index=False)["level"].max()
    counts = [float(level + 1) for level in highest["level"]]
    return list(zip(highest["rank"].tolist(), highest["lane"].tolist(), counts, strict=True))


def hover_texts(bars: pd.DataFrame, origin: int) -> list[str]:
    """What is said of each bar, escaped."""
    columns = [str(name) for name in bars.columns]
    rows = zip(*(bars[name].tolist() for name in columns), strict=True)
    return [_hover_text(dict(zip(columns, row, strict=True)), origin) for row in rows]


def _hover_text(row: dict[str, Any], origin: int) -> str:
    said = [
        f"<b>{escape(row['op'])}</b>" + _after(" for ", row["intended_op"]) + _after(", ", row["purpose"])
    ]
    said.append(
        f"rank {row['rank']}, step {row['step']}, {escape(row['phase'])}, group {escape(_short(row['pg'], 30))} "
        f"({escape(_short(row['group_ranks'], 30))})"
    )
    said.append(f"{api.format_bytes(row['payload_bytes'])} payload" + _after(", ", row["dtype"]))
    if not pd.isna(row["bucket"]):
        said.append(f"bucket {row['bucket']}")
    if not pd.isna(row["parameters"]):
        said.append(escape(_short(row["parameters"], 70)))
    said.append(
        f"at {api.format_ns(row['begin_ns'] - origin)}, for {api.format_ns(row['end_ns'] - row['begin_ns'])}"
    )
    if not pd.isna(row["exposed_ns"]):
        said.append(f"the program stood still {api.format_ns(row['exposed_ns'])}")
    if row["status"] != "ok":
        said.append(f"<b>{escape(row['status'])}</b>")
    return "<br>".join(said)


def _after(before: str, value: Any) -> str:
    return "" if pd.isna(value) else before + escape(_short(value, 40))


def _short(text: Any, most: int) -> str:
    plain = str(text)
    return plain if len(plain) <= most else plain[: most - 3] + "..."


def _draw_density(
    drawn: go.Figure, density: pd.DataFrame, rows: Sequence[Row], origin: int, scheme: Scheme
) -> None:
    """One heatmap with two rows a rank: how busy it was, in the colour of what took most; how long it stood still."""
    if density.empty or not rows:
        return
    width = int(density["end_ns"].iloc[0] - density["begin_ns"].iloc[0])
    first, last = int(density["begin_ns"].min()), int(density["begin_ns"].max())
    bins = (last - first) // width + 1
    place = {row.rank: number for number, row in enumerate(rows)}
    known = set(density["op"])
    ops = [op for op in OPS if op in known]
    busy = np.zeros((len(rows), len(ops), bins))
    held = np.zeros((len(rows), bins))
    at = (
        density["rank"].map(place).to_numpy(),
        density["op"].map({op: number for number, op in enumerate(ops)}).to_numpy(),
        ((density["begin_ns"] - first) // width).to_numpy(),
    )
    busy[at] = density["busy_share"].to_numpy()
    np.add.at(held, (at[0], at[2]), density["exposed_ns"].to_numpy() / width)
    total = busy.sum(axis=1)
    colour = busy.argmax(axis=1)
    levels = np.full((3 * len(rows), bins), np.nan)
    levels[0::3] = np.where(total > 0, colour + np.clip(total, 0, 0.999), np.nan)
    levels[1::3] = np.where(held > 0, len(ops) + np.clip(held, 0, 0.999), np.nan)
    texts = np.full((3 * len(rows), bins), "", dtype=object)
    for number, row in enumerate(rows):
        for cell in np.flatnonzero(total[number] > 0):
            shares = sorted(zip(busy[number, :, cell], ops, strict=True), reverse=True)
            said = ", ".join(f"{op} {100 * share:.0f} %" for share, op in shares[:3] if share > 0)
            texts[3 * number, cell] = (
                f"<b>rank {row.rank}</b>: {said}; stood still {100 * held[number, cell]:.0f} %"
            )
            texts[3 * number + 1, cell] = texts[3 * number, cell]
    edges = [edge for row in rows for edge in (row.top, row.top + 1.25, row.top + 1.7)]
    drawn.add_heatmap(
        name="busy",
        x=[float(first - origin + width * number) for number in range(bins + 1)],
        y=[*edges, rows[-1].top + 2.0],
        z=levels,
        text=texts.tolist(),
        zmin=0,
        zmax=len(ops) + 1,
        colorscale=_scale([*(OP_COLOURS.get(op, OTHER_COLOUR) for op in ops), EXPOSED_COLOUR], scheme),
        showscale=False,
        hoverongaps=False,
        hovertemplate="%{text}<br>" + f"in {api.format_ns(width)}<extra></extra>",
    )


def _scale(colours: Sequence[str], scheme: Scheme) -> list[list[Any]]:
    """For each colour a part of the scale, from faint to full."""
    stops: list[list[Any]] = []
    for number, colour in enumerate(colours):
        stops.append([number / len(colours), _mixed(colour, PAPER[scheme], 0.28)])
        stops.append([(number + 1) / len(colours) - (1e-9 if number + 1 < len(colours) else 0), colour])
    return stops


def _mixed(colour: str, with_colour: str, share: float) -> str:
    mixed = (
        round(int(colour[i : i + 2], 16) * share + int(with_colour[i : i + 2], 16) * (1 - share))
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _bands(
    bands: pd.DataFrame, origin: int, begin: int, end: int, scheme: Scheme, strip: float
) -> list[dict[str, Any]]:
    """Every second step shaded, and a strip for the phases above the ranks."""
    shapes = []
    for row in bands.to_dict("records"):
        place = {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": max(begin, row["begin_ns"] - origin),
            "x1": min(end, row["end_ns"] - origin),
            "line": {"width": 0},
        }
        if row["kind"] == "phase":
            colour = PHASE_COLOURS.get(row["name"], OTHER_COLOUR)
            shapes.append(place | {"y0": 1 - strip * 0.42, "y1": 1 - strip * 0.16, "fillcolor": colour})
        else:
            looks: dict[str, Any] = {"layer": "below", "line": {"width": 1, "color": GRID[scheme]}}
            fill = GRID[scheme] if row["step"] % 2 else "rgba(0,0,0,0)"
            shapes.append(place | looks | {"y0": 0, "y1": 1 - strip * 0.5, "fillcolor": fill, "opacity": 0.5})
    return shapes


def _names(bands: pd.DataFrame, origin: int, begin: int, end: int, scheme: Scheme) -> list[dict[str, Any]]:
    """The names of the steps that have room for one; of those that have room for a number, the number."""
    named = []
    for row in bands[bands["kind"] == "step"].to_dict("records"):
        first, last = max(begin, row["begin_ns"] - origin), min(end, row["end_ns"] - origin)
        share = (last - first) / (end - begin)
        if share >= _NUMBERED:
            named.append(
                {
                    "x": (first + last) / 2,
                    "y": 1,
                    "yref": "paper",
                    "yanchor": "bottom",
                    "text": escape(row["name"] if share >= _NAMED else row["step"]),
                    "showarrow": False,
                    "font": {"size": 11, "color": MUTED_TEXT[scheme]},
                }
            )
    return named


def time_ticks(begin: int, end: int, count: int = 6) -> tuple[list[float], list[str]]:
    """Values and texts of ticks of time between ``begin`` and ``end`` ns, with as many digits as they need to differ."""
    reach = max(abs(begin), abs(end), 1)
    unit, name = max((u for u in _UNITS if u[0] <= reach), default=_UNITS[0])
    step = step_size((end - begin) / unit, count)
    digits = min(9, max(0, -math.floor(math.log10(step) + 1e-9)))
    digits += 1 if not math.isclose(step, round(step, digits), rel_tol=1e-9) else 0
    first = math.ceil(begin / unit / step - 1e-9)
    last = math.floor(end / unit / step + 1e-9)
    numbers = [step * number for number in range(first, min(last, first + 40) + 1)]
    return [number * unit for number in numbers], [f"{number:,.{digits}f} {name}" for number in numbers]
