"""Builds the timeline: a bar for each record or, if there are too many records, how busy each rank was."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts.axis_ticks import step_size
from commprof_dash.charts.density_chart import Called, LaneRow, draw_density, draw_heat, lane_rows, names_of
from commprof_dash.charts.labels import escape
from commprof_dash.charts.series import marker, series_in_order, with_series
from commprof_dash.charts.sketch import Sketch
from commprof_dash.theme import (
    EXPOSED_COLOUR,
    GRID,
    MUTED_TEXT,
    OTHER_COLOUR,
    TEXT,
    Scheme,
)

PHASE_COLOURS: Final[dict[str, str]] = {
    "init": "#5f6b7a",
    "forward": "#74a7d8",
    "backward": "#d9a441",
    "optimizer": "#7fb069",
    "checkpoint": "#a58bd0",
    "other": "#a7adb4",
}
EXPOSED: Final = "exposed communication"
_UNITS: Final = ((1, "ns"), (1_000, "us"), (1_000_000, "ms"), (1_000_000_000, "s"))
# The pixels of the strip of steps and phases above the ranks. The ranks below grow with the window.
_STRIP: Final = 18
_LEVEL: Final = 13  # the pixels of a level of a lane
_BESIDE: Final = 60  # pixels above and below the ranks and the strip
_LEGIBLE: Final = 11  # the smallest height of a level, in pixels, at which its lane has room for a name
_FEWEST_PIXELS: Final = 26  # the smallest height of a rank
_MOST_HEIGHT: Final = 1100
_MOST_LABELS: Final = 40  # the largest number of labels in a heat map
_NAME: Final = 14  # the characters of a lane's name that are shown beside the lane
# The smallest part of the width at which a step has room for its name, also at a width of 400 pixels.
_NAMED: Final = 0.13
_NUMBERED: Final = 0.045  # the smallest part of the width at which a step has room for its number
_EVERY: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Row(NamedTuple):
    """The position of the records of one rank, from ``top`` downwards, in units of one level."""

    rank: int
    top: float
    height: float


class Heat(NamedTuple):
    """The rows of a heat map: their labels, their ranks, and the ranks that a click on each shows."""

    labels: Sequence[str]
    ranks: Sequence[Sequence[int]]
    unfolds: Sequence[str]


def figure(
    shown: api.Timeline,
    scheme: Scheme,
    selected: Sequence[tuple[int, int, int, int]] = (),
    heat: Heat | None = None,
) -> go.Figure:
    """Return the figure of a window of time. The x axis is in nanoseconds since the run began.

    Args:
        selected: The records (rank, attempt, pid, seq) that are outlined, which are one collective on its ranks.
        heat: The rows of the heat map, if there are too many ranks for lanes.
    """
    drawn = Sketch(scheme)
    origin = shown.run_begin_ns
    lanes: list[LaneRow] = []
    # Few records are drawn as bars, many records as the busy share of each moment, and many ranks as a heat
    # map.
    if shown.bars is not None:
        rows = rows_of(shown.bars, shown.ranks)
        _draw_bars(drawn, shown, rows, origin, scheme, set(selected))
    elif heat is not None:
        assert shown.density is not None
        rows = [Row(number, number - 0.5, 1.0) for number in range(len(heat.labels))]
        draw_heat(drawn, shown.density, heat.labels, heat.ranks, heat.unfolds, origin, scheme)
    else:
        assert shown.density is not None
        lanes = lane_rows(shown)
        rows = _ranks_of(lanes)
        draw_density(drawn, shown.density, lanes, origin, scheme)
    depth = rows[-1].top + rows[-1].height if rows else 1.0
    height = _height(rows, depth) if heat is None else _heat_height(len(rows))
    # Lanes have names if there is room for a line of text.
    if shown.bars is not None and (height - _STRIP - _BESIDE) / depth >= _LEGIBLE:
        lanes = bar_lanes(shown.bars, rows)
    begin, end = shown.begin_ns - origin, shown.end_ns - origin
    values, texts = time_ticks(begin, end)
    drawn.update_layout(
        height=height,
        barmode="overlay",
        bargap=0,
        margin={"t": 24 + _STRIP},
        dragmode="zoom",
        hovermode="closest",
        shapes=_bands(shown.bands, origin, begin, end, scheme),
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
            "range": [depth + 0.15, -0.15] if heat is None else [depth, -0.5],
            **(
                _heat_ticks(heat.labels)
                if heat is not None
                else _lane_ticks(lanes)
                if any(lane.name for lane in lanes)
                else _rank_ticks(rows)
            ),
            "ticklen": 6,
            "tickcolor": "rgba(0,0,0,0)",
            "ticks": "outside",
            "showgrid": False,
            "zeroline": False,
        },
    )
    return drawn.figure()


def _heat_height(rows: int) -> int:
    return round(max(240, min(_MOST_HEIGHT, 14 * rows) + _STRIP + _BESIDE))


def _heat_ticks(labels: Sequence[str]) -> dict[str, Any]:
    every = -(-len(labels) // _MOST_LABELS) or 1
    places = range(0, len(labels), every)
    return {"tickvals": list(places), "ticktext": [escape(_short(labels[place], 24)) for place in places]}


def _rank_ticks(rows: Sequence[Row]) -> dict[str, Any]:
    before = "rank " if len(rows) <= 64 else ""
    return {
        "tickvals": [row.top + row.height / 2 for row in rows],
        "ticktext": [f"{before}{row.rank}" for row in rows],
    }


def _lane_ticks(lanes: Sequence[LaneRow]) -> dict[str, Any]:
    """Return the ticks of the lanes: the name of the group, after the rank for the first lane of a rank."""
    texts = []
    for number, lane in enumerate(lanes):
        name = escape(_short(lane.name, _NAME))
        is_first = number == 0 or lanes[number - 1].is_last
        texts.append(f"<b>rank {lane.rank}</b> {name}" if is_first else name)
    return {
        "tickvals": [lane.top + lane.height / 2 for lane in lanes],
        "ticktext": texts,
        "tickfont": {"size": 11},
    }


def bar_lanes(bars: pd.DataFrame, rows: Sequence[Row]) -> list[LaneRow]:
    """Return the lanes of the bars, from the top. The lanes have no names if no rank has several lanes."""
    lanes = bars.drop_duplicates(["rank", "lane"])
    names_known = lanes[["pg", "group_desc"]].astype(object).where(lanes[["pg", "group_desc"]].notna(), None)
    called = [
        Called(int(rank), int(lane), pg, desc)
        for rank, lane, pg, desc in zip(
            lanes["rank"], lanes["lane"], names_known["pg"], names_known["group_desc"], strict=True
        )
    ]
    several = max(Counter(each.rank for each in called).values(), default=0) > 1
    names = names_of(called) if several else {}
    ranks = dict(
        zip(
            zip(lanes["rank"].tolist(), lanes["lane"].tolist(), strict=True),
            lanes["group_ranks"],
            strict=True,
        )
    )
    heights: dict[int, list[tuple[int, float]]] = {}
    for rank, lane, count in _lane_heights(bars):
        heights.setdefault(rank, []).append((lane, count))
    result = []
    for row in rows:
        top, of_rank = row.top, heights.get(row.rank, [(0, row.height)])
        for lane, count in of_rank:
            key = (row.rank, lane)
            is_last = lane == of_rank[-1][0]
            result.append(LaneRow(*key, names.get(key, ""), str(ranks.get(key, "")), top, count, is_last))
            top += count
    return result


def _ranks_of(lanes: Sequence[LaneRow]) -> list[Row]:
    tops = {lane.rank: lane.top for lane in reversed(lanes)}
    return [Row(lane.rank, tops[lane.rank], lane.bottom - tops[lane.rank]) for lane in lanes if lane.is_last]


def _height(rows: Sequence[Row], depth: float) -> int:
    per_rank = max(8, _FEWEST_PIXELS if len(rows) <= 32 else _MOST_HEIGHT // max(1, len(rows)))
    wanted = max(_LEVEL * depth, per_rank * len(rows))
    return round(max(220, min(_MOST_HEIGHT, wanted + _STRIP + _BESIDE)))


def rows_of(bars: pd.DataFrame, ranks: Sequence[int]) -> list[Row]:
    """Return a row for each rank, as high as the levels of its lanes in the window, with a little room below."""
    levels: dict[int, float] = {}
    for rank, _, count in _lane_heights(bars):
        levels[rank] = levels.get(rank, 0.0) + count
    rows, top = [], 0.0
    for rank in ranks:
        height = max(1.0, levels.get(rank, 0.0))
        rows.append(Row(rank, top, height))
        top += height + 0.6
    return rows


def _draw_bars(
    drawn: Sketch,
    shown: api.Timeline,
    rows: Sequence[Row],
    origin: int,
    scheme: Scheme,
    selected: set[tuple[int, int, int, int]],
) -> None:
    bars = shown.bars
    assert bars is not None
    frame = with_series(bars).assign(
        place=places(bars, rows), text=hover_texts(bars, origin, step_begins(shown.bands))
    )
    for one in series_in_order(frame["series"]):
        part = frame[frame["series"] == one.name]
        looks = marker(one) | {"line": {"width": 0.6, "color": one.colour}}
        drawn.add_bar(name=one.name, **_spans(part, "begin_ns", "end_ns", origin), marker=looks)
        drawn.traces[-1].update(
            customdata=list(zip(map(list, _keys(part)), part["text"], strict=True)),
            # The line above the figure shows the text, because a box would cover the neighboring bars.
            hoverinfo="none",
        )
    exposed = frame[frame["exposed_end_ns"].notna()]
    if len(exposed):
        pattern = {"shape": "/", "size": 6, "solidity": 0.2, "fgcolor": TEXT[scheme], "fgopacity": 0.6}
        drawn.add_bar(
            name=EXPOSED,
            **_spans(exposed, "exposed_begin_ns", "exposed_end_ns", origin),
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
    """Return the position of each bar from the top, which follows from its rank, lane and level."""
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
    """Return the rank, lane and number of levels of each lane, in order."""
    highest = bars.groupby(["rank", "lane"], as_index=False)["level"].max()
    counts = [float(level + 1) for level in highest["level"]]
    return list(zip(highest["rank"].tolist(), highest["lane"].tolist(), counts, strict=True))


def step_begins(bands: pd.DataFrame) -> dict[tuple[int, int], int]:
    """Return the time at which each step of ``bands`` began, by attempt and step number."""
    steps = bands[bands["kind"] == "step"]
    keys = zip(steps["attempt"].tolist(), steps["step"].tolist(), strict=True)
    return dict(zip(keys, steps["begin_ns"].tolist(), strict=True))


def hover_texts(bars: pd.DataFrame, origin: int, steps: Mapping[tuple[int, int], int]) -> list[str]:
    """Return the escaped hover text of each bar. Times are relative to the start of the step, if this is known."""
    columns = [str(name) for name in bars.columns]
    rows = zip(*(bars[name].tolist() for name in columns), strict=True)
    return [_hover_text(dict(zip(columns, row, strict=True)), origin, steps) for row in rows]


def _hover_text(row: dict[str, Any], origin: int, steps: Mapping[tuple[int, int], int]) -> str:
    lines = [
        f"<b>{escape(row['op'])}</b>" + _after(" for ", row["intended_op"]) + _after(", ", row["purpose"])
    ]
    lines.append(
        f"rank {row['rank']}, step {row['step']}, {escape(row['phase'])}, group {escape(_short(row['pg'], 30))} "
        f"({escape(_short(row['group_ranks'], 30))})"
    )
    lines.append(f"{api.format_bytes(row['payload_bytes'])} payload" + _after(", ", row["dtype"]))
    if not pd.isna(row["bucket"]):
        lines.append(f"bucket {row['bucket']}")
    if not pd.isna(row["parameters"]):
        lines.append(escape(_short(row["parameters"], 70)))
    began = steps.get((row["attempt"], row["step"]))
    since = (
        f"at {api.format_ns(row['begin_ns'] - origin)}"
        if began is None
        else f"{api.format_ns(row['begin_ns'] - began)} into step {row['step']}"
    )
    lines.append(f"{since}, for {api.format_ns(row['end_ns'] - row['begin_ns'])}")
    if not pd.isna(row["exposed_ns"]):
        lines.append(f"exposed communication {api.format_ns(row['exposed_ns'])}")
    if row["status"] != "ok":
        lines.append(f"<b>{escape(row['status'])}</b>")
    return "<br>".join(lines)


def _after(before: str, value: Any) -> str:
    return "" if pd.isna(value) else before + escape(_short(value, 40))


def _short(text: Any, most: int) -> str:
    plain = str(text)
    return plain if len(plain) <= most else plain[: most - 3] + "..."


def _bands(bands: pd.DataFrame, origin: int, begin: int, end: int, scheme: Scheme) -> list[dict[str, Any]]:
    """Return the shading of every second step, and a strip for the phases above the ranks."""
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
            above = {"yanchor": 1, "ysizemode": "pixel", "y0": 0.25 * _STRIP, "y1": 0.7 * _STRIP}
            shapes.append(place | above | {"fillcolor": colour})
        else:
            looks: dict[str, Any] = {"layer": "below", "line": {"width": 1, "color": GRID[scheme]}}
            fill = GRID[scheme] if row["step"] % 2 else "rgba(0,0,0,0)"
            shapes.append(place | looks | {"y0": 0, "y1": 1, "fillcolor": fill, "opacity": 0.5})
    return shapes


def _names(bands: pd.DataFrame, origin: int, begin: int, end: int, scheme: Scheme) -> list[dict[str, Any]]:
    """Return the names of the steps if there is room; else the numbers of every second, fifth, tenth, ... step."""
    steps = bands[bands["kind"] == "step"].to_dict("records")
    spans = [(max(begin, row["begin_ns"] - origin), min(end, row["end_ns"] - origin)) for row in steps]
    widest = max((last - first for first, last in spans), default=0) / (end - begin)
    typical = sorted(last - first for first, last in spans)[len(spans) // 2] / (end - begin) if spans else 0
    every = next((count for count in _EVERY if count * typical >= _NUMBERED), _EVERY[-1] if typical else 1)
    named = []
    for row, (first, last) in zip(steps, spans, strict=True):
        share = (last - first) / (end - begin)
        if (share >= _NUMBERED and (every == 1 or share == widest)) or (
            every > 1 and row["step"] % every == 0
        ):
            named.append(
                {
                    "x": (first + last) / 2,
                    "y": 1,
                    "yref": "paper",
                    "yanchor": "bottom",
                    "yshift": _STRIP,
                    "text": escape(row["name"] if share >= _NAMED else row["step"]),
                    "showarrow": False,
                    "font": {"size": 11, "color": MUTED_TEXT[scheme]},
                }
            )
    return named


def time_ticks(begin: int, end: int, count: int = 6) -> tuple[list[float], list[str]]:
    """Return the values and texts of time ticks between ``begin`` and ``end`` ns, with enough digits to differ."""
    reach = max(abs(begin), abs(end), 1)
    unit, name = max((u for u in _UNITS if u[0] <= reach), default=_UNITS[0])
    step = step_size((end - begin) / unit, count)
    digits = min(9, max(0, -math.floor(math.log10(step) + 1e-9)))
    digits += 1 if not math.isclose(step, round(step, digits), rel_tol=1e-9) else 0
    first = math.ceil(begin / unit / step - 1e-9)
    last = math.floor(end / unit / step + 1e-9)
    numbers = [step * number for number in range(first, min(last, first + 40) + 1)]
    return [number * unit for number in numbers], [f"{number:,.{digits}f} {name}" for number in numbers]
