"""Builds the lateness charts: how late each rank arrives, per step and overall, and what the ranks wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pandas as pd
import plotly.graph_objects as go

from commprof.analysis import api
from commprof_dash.charts.axis_ticks import axis, step_ticks
from commprof_dash.charts.listed import listed
from commprof_dash.charts.rank_charts import rank_axis
from commprof_dash.charts.series import hatched
from commprof_dash.charts.sketch import Sketch
from commprof_dash.theme import (
    EXPOSED_COLOUR,
    OTHER_COLOUR,
    SETTING_COLOURS,
    STEP_COLOUR,
    TEXT,
    Scheme,
)

CAUSES: Final = {
    "late_arrival": ("late arrival: another rank had not issued it", EXPOSED_COLOUR, ""),
    "late_launch": ("late launch: issued, but a device had not begun", SETTING_COLOURS[4], "x"),
    "slow_transfer": ("slow transfer: all had begun", STEP_COLOUR, "/"),
}

_LATE_LOOKS: Final = (
    (EXPOSED_COLOUR, "circle"),
    (SETTING_COLOURS[0], "square"),
    (SETTING_COLOURS[1], "diamond"),
    (SETTING_COLOURS[2], "cross"),
    (SETTING_COLOURS[4], "star"),
)
# The largest number of lines for ranks that are not late; more ranks are drawn as a band.
_MOST_LINES: Final = 16
_MOST_MARKED: Final = 60  # the largest number of steps that have a marker each
_OTHERS: Final = ("others_lowest_ns", "others_median_ns", "others_highest_ns")
_BAND: Final = "rgba(125,133,140,0.28)"  # a faint OTHER_COLOUR


def step_lines(frame: pd.DataFrame, late: Sequence[int]) -> pd.DataFrame:
    """Return the data of :func:`over_steps`: one row per step, with the lateness of each rank.

    If there are many ranks, only those in ``late`` have a column. The other ranks are combined in columns with
    their lowest, median and highest lateness. If a step was repeated after a restart, only its last attempt
    counts.

    Args:
        frame: The columns ``rank``, ``step``, ``steps``, ``lateness_ns``, in order of time.
    """
    latest = frame.drop_duplicates(["rank", "step"], keep="last")
    table = latest.pivot(index="step", columns="rank", values="lateness_ns").sort_index().astype(float)
    named = [rank for rank in late if rank in table.columns][: len(_LATE_LOOKS)]
    others = table.drop(columns=named)
    lines = {column_of(rank): table[rank] for rank in named}
    if len(others.columns) <= _MOST_LINES:
        lines |= {column_of(int(rank)): others[rank] for rank in others.columns}
    else:
        ends = (others.min(axis=1), others.median(axis=1), others.max(axis=1))
        lines |= dict(zip(_OTHERS, ends, strict=True))
    steps = latest.groupby("step")["steps"].max()
    return pd.DataFrame({"step": table.index, "steps": steps.reindex(table.index), **lines}).reset_index(
        drop=True
    )


def column_of(rank: int) -> str:
    """Return the name of a rank's column in the result of :func:`step_lines`."""
    return f"rank_{rank}_ns"


def over_steps(
    lines: pd.DataFrame, late: Sequence[int], since: Mapping[int, int], error_ns: float, scheme: Scheme
) -> go.Figure:
    """Return the chart of the lateness of each rank in each step: the late ranks in color, the others in grey.

    Args:
        lines: The result of :func:`step_lines` for ``late``.
        since: The step from which a rank is late, if the rank is not late from the start.
        error_ns: The error of the clocks in ns, drawn as a line unless it is 0.
    """
    figure = Sketch(scheme)
    steps = lines["step"].tolist()
    texts = [
        f"step {step}" if count == 1 else f"steps {step} to {step + count - 1}, mean"
        for step, count in zip(steps, lines["steps"].tolist(), strict=True)
    ]
    named = [rank for rank in late if column_of(rank) in lines]
    names = [column_of(rank) for rank in named]
    others = [name for name in lines.columns if name.startswith("rank_") and name not in names]
    if others:
        _add_grey_lines(figure, lines[others], steps, texts)
    if _OTHERS[0] in lines:
        _add_band(figure, lines, steps, texts)
    for rank, (colour, symbol) in zip(named, _LATE_LOOKS, strict=False):
        values = lines[column_of(rank)]
        figure.add_scatter(
            name=f"rank {rank}",
            mode="lines+markers" if len(steps) <= _MOST_MARKED else "lines",
            x=listed(steps),
            y=listed(_numbers(values)),
            customdata=listed(_told(f"rank {rank}", texts, values)),
            line={"color": colour, "width": 2.5},
            marker={"symbol": symbol, "size": 7, "color": colour},
            hovertemplate="%{customdata}<extra></extra>",
        )
    highest = float(lines.drop(columns=["step", "steps"]).max().max()) if len(lines) else 0.0
    if error_ns > 0:
        figure.add_scatter(
            name="clock error: below this line ranks cannot be distinguished",
            mode="lines",
            x=[steps[0], steps[-1]],
            y=[error_ns, error_ns],
            line={"color": TEXT[scheme], "dash": "dash", "width": 1.5},
            hoverinfo="skip",
        )
    figure.update_layout(
        height=220,
        xaxis={"title": {"text": "Training step"}, "showgrid": False, **step_ticks(steps)},
        yaxis=axis(max(highest, error_ns), "ns", "After the first rank", room=1.12),
        shapes=[_mark(step, scheme) for step in set(since.values())],
        annotations=_begins(since, steps),
    )
    return figure.figure()


def _add_grey_lines(figure: Sketch, lines: pd.DataFrame, steps: list[int], texts: list[str]) -> None:
    """Add all ranks that are not late as one trace, with a gap between two ranks."""
    ranks = [name.split("_")[1] for name in lines.columns]
    x: list[int | None] = []
    y: list[float | None] = []
    hover_texts: list[str] = []
    for rank, name in zip(ranks, lines.columns, strict=True):
        x += [*steps, None]
        y += [*_numbers(lines[name]), None]
        hover_texts += [*_told(f"rank {rank}", texts, lines[name]), ""]
    figure.add_scatter(
        name=f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}",
        mode="lines+markers" if len(steps) <= _MOST_MARKED else "lines",
        x=listed(x),
        y=listed(y),
        customdata=listed(hover_texts),
        line={"color": OTHER_COLOUR, "width": 1.2},
        marker={"size": 4, "color": OTHER_COLOUR},
        hovertemplate="%{customdata}<extra></extra>",
    )


def _add_band(figure: Sketch, lines: pd.DataFrame, steps: list[int], texts: list[str]) -> None:
    low, middle, high = (_numbers(lines[name]) for name in _OTHERS)
    figure.add_scatter(
        name="the other ranks, lowest to highest",
        mode="lines",
        x=listed([*steps, *reversed(steps)]),
        y=listed([*high, *reversed(low)]),
        fill="toself",
        fillcolor=_BAND,
        line={"color": OTHER_COLOUR, "width": 0.5},
        hoverinfo="skip",
    )
    figure.add_scatter(
        name="their median",
        mode="lines",
        x=listed(steps),
        y=listed(middle),
        customdata=listed(
            f"{text}: median of the other ranks {api.format_ns(one)},<br>"
            f"{api.format_ns(least)} to {api.format_ns(most)}"
            for text, least, one, most in zip(texts, *(lines[name] for name in _OTHERS), strict=True)
        ),
        line={"color": OTHER_COLOUR, "width": 2, "dash": "dot"},
        hovertemplate="%{customdata}<extra></extra>",
    )


def _numbers(values: pd.Series[float]) -> list[float | None]:
    return [None if pd.isna(value) else float(value) for value in values]


def _told(who: str, texts: list[str], values: pd.Series[float]) -> list[str]:
    return [
        "" if pd.isna(value) else f"<b>{who}</b>, {text}: {api.format_ns(value)} after the first rank"
        for text, value in zip(texts, values, strict=True)
    ]


def _mark(step: int, scheme: Scheme) -> dict[str, object]:
    line = {"color": TEXT[scheme], "width": 1.5, "dash": "dash"}
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": step,
        "x1": step,
        "y0": 0,
        "y1": 1,
        "line": line,
    }


def _begins(since: Mapping[int, int], steps: list[int]) -> list[dict[str, object]]:
    """Return a text beside the line of each step from which ranks are late."""
    texts = []
    for step in sorted(set(since.values())):
        ranks = sorted(rank for rank, begin in since.items() if begin == step)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        is_right = step - steps[0] > 0.6 * (steps[-1] - steps[0])
        texts.append(
            {
                "x": step,
                "y": 1,
                "xref": "x",
                "yref": "paper",
                "yanchor": "top",
                "xanchor": "right" if is_right else "left",
                "xshift": -6 if is_right else 6,
                "text": f"{who} late from step {step} on",
                "showarrow": False,
            }
        )
    return texts


def boxes(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return a box per rank: the box covers the middle half of the rank's collectives, the whiskers nine tenths.

    Args:
        frame: One row per rank: ``rank``, ``p5_ns``, ``p25_ns``, ``median_ns``, ``p75_ns``, ``p95_ns``,
            ``error_ns``.
    """
    figure = Sketch(scheme)
    figure.add_box(
        name="middle half, and 5 to 95 %",
        x=frame["rank"].tolist(),
        q1=frame["p25_ns"].astype(float).tolist(),
        median=frame["median_ns"].astype(float).tolist(),
        q3=frame["p75_ns"].astype(float).tolist(),
        lowerfence=frame["p5_ns"].astype(float).tolist(),
        upperfence=frame["p95_ns"].astype(float).tolist(),
        marker={"color": SETTING_COLOURS[0]},
        line={"width": 1.5, "color": SETTING_COLOURS[0]},
        hoverinfo="skip",
    )
    figure.add_scatter(
        name="median",
        mode="markers",
        x=frame["rank"].tolist(),
        y=frame["median_ns"].astype(float).tolist(),
        customdata=[
            f"median {api.format_ns(row['median_ns'])}, half within {api.format_ns(row['p25_ns'])} to "
            f"{api.format_ns(row['p75_ns'])},<br>95 % below {api.format_ns(row['p95_ns'])}, "
            f"error {api.format_ns(row['error_ns'])}"
            for row in frame.to_dict("records")
        ],
        marker={"color": SETTING_COLOURS[0], "size": 7},
        line={"color": SETTING_COLOURS[0]},
        hovertemplate="Rank %{x}: %{customdata}<extra></extra>",
    )
    bound = frame["error_ns"].astype(float)
    if bound.max() > 0:
        figure.add_scatter(
            name="clock error: below this line ranks cannot be distinguished",
            mode="lines",
            x=frame["rank"].tolist(),
            y=bound.tolist(),
            line={"color": EXPOSED_COLOUR, "dash": "dash", "width": 2},
            hoverinfo="skip",
        )
    highest = float(max(frame["p95_ns"].max(), bound.max(), 1)) if len(frame) else 1.0
    figure.update_layout(
        height=320,
        xaxis=rank_axis(frame["rank"]),
        yaxis=axis(highest, "ns", "After the first rank", room=1.08),
    )
    return figure.figure()


def causes(frame: pd.DataFrame, scheme: Scheme) -> go.Figure:
    """Return the time by its main cause as stacked bars, one bar per rank.

    Args:
        frame: The columns ``rank``, ``cause``, ``collectives``, ``time_ns``.
    """
    figure = Sketch(scheme)
    for cause, (name, colour, hatch) in CAUSES.items():
        part = frame[frame["cause"] == cause]
        figure.add_bar(
            name=name,
            x=part["rank"].tolist(),
            y=part["time_ns"].astype(float).tolist(),
            customdata=[
                f"{api.format_ns(time)} in {count:,} collectives"
                for time, count in zip(part["time_ns"], part["collectives"], strict=True)
            ],
            marker=hatched(colour, hatch, 0.35),
            hovertemplate="Rank %{x}<br>" + name + ": <b>%{customdata}</b><extra></extra>",
        )
    highest = float(frame.groupby("rank")["time_ns"].sum().max()) if len(frame) else 0.0
    figure.update_layout(
        height=320,
        barmode="stack",
        xaxis=rank_axis(frame["rank"]),
        yaxis=axis(highest, "ns", "Time in collectives", room=1.05),
    )
    return figure.figure()
