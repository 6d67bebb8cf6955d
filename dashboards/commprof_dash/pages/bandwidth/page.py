"""The page Bandwidth: the bandwidth that collectives reached by size, and the machine's ceiling."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pandas as pd
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash import address
from commprof_dash.address import Query
from commprof_dash.charts import bandwidth_chart
from commprof_dash.charts.bandwidth_chart import BUSBW, RATES, Rate, format_rate
from commprof_dash.components import cards, controls, messages
from commprof_dash.components.tables import Field
from commprof_dash.data import Runs
from commprof_dash.measures import format_count
from commprof_dash.pages.bandwidth import data as bandwidth_data
from commprof_dash.pages.index_wait import builds, waiting_for_index
from commprof_dash.pages.matrix.page import parse_steps
from commprof_dash.pages.one_run import draw_run, no_records
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.pages.timeline.data import path_of
from commprof_dash.theme import Scheme

ALL: Final = "all"
NONE: Final = "none"
OP: Final = "op"
GROUP: Final = "group"
CALIBRATION: Final = "calibration"
STEPS: Final = "steps"
_STRANGE: Final = ("impossible", "slow", "fast")
_MOST_SERIES: Final = 24  # more lines cannot be distinguished
_MOST_MARKS: Final = 2000
_TABLE_ROWS: Final = 500
_MOST_CHOICES: Final = 500


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """Return the page for the run, bandwidth, operation, group and calibration in ``query``."""

    def answers(name: str) -> tuple[Sequence[Component], Sequence[Component]]:
        waiting = builds.wait_for(path_of(runs, name))
        if waiting is not None:
            return [], waiting_for_index(waiting, name)
        listed = bandwidth_data.calibrations(runs)
        readable = dict(zip(listed["name"], listed["path"], strict=True))
        chosen = _chosen(query, listed, name)
        broken = listed[listed["note"].notna() & (listed["name"] == chosen)]
        file = Path(readable[chosen]) if chosen in readable and broken.empty else None
        written = next(iter(query.get(STEPS, ())), "")[:40]
        steps, wrong = parse_steps(written)
        recent = None if written else bandwidth_data.recent_steps(runs, name)
        measured = bandwidth_data.bandwidths(runs, name, file, recent or steps)
        rate = RATES[address.one(query, address.MEASURE, RATES, BUSBW.key)]
        op = _named(query, OP)
        group = _named(query, GROUP)
        controls_shown = [
            _rate_select(rate),
            controls.select(OP, "Operation", _choices(measured.sizes["op"], op), op),
            controls.select(GROUP, "Ranks", _choices(measured.sizes["group_ranks"], group), group),
            controls.text(STEPS, "Steps", written, "all, 3 or 2-9", wrong),
            controls.select(
                CALIBRATION,
                "Ceiling",
                list(dict.fromkeys([NONE, chosen, *listed["name"]]))[:_MOST_CHOICES],
                chosen,
            ),
        ]
        nothing = no_records(runs, name) if measured.sizes.empty else None
        if nothing is not None:
            return [], [nothing]
        body = [
            *_answers(measured, op, group, rate, file, scheme),
            *([] if recent is None else [_about_steps(*recent)]),
            *_about_ceiling(runs, chosen, file, broken),
        ]
        return controls_shown, body

    return draw_run(runs, query, answers)


def _about_steps(first: int, last: int) -> Component:
    text = f"This run is long: only steps {first:,} to {last:,} are shown. Enter others above, or all (takes longer)."
    return messages.message("The last steps", text)


def _chosen(query: Query, listed: pd.DataFrame, run: str) -> str:
    """Return the calibration that the address names, or else the one that belongs to the run, or else none."""
    named = next(iter(query.get(CALIBRATION, ())), None)
    return named if named is not None else bandwidth_data.nearest(listed, run) or NONE


def _named(query: Query, key: str) -> str:
    return next(iter(query.get(key, ())), ALL)


def _choices(present: pd.Series[str], chosen: str) -> list[str]:
    return [ALL, *dict.fromkeys([*sorted(set(present)), *([] if chosen == ALL else [chosen])])]


def _rate_select(rate: Rate) -> Component:
    return controls.segmented(
        address.MEASURE, "Bandwidth", {one.key: one.name for one in RATES.values()}, rate.key
    )


def _about_ceiling(runs: Runs, chosen: str, file: Path | None, broken: pd.DataFrame) -> list[Component]:
    """Return why there is no ceiling, and how to get one."""
    if file is not None:
        return []
    if len(broken):
        return [messages.broken_run(chosen, str(broken["note"].iloc[0]))]
    command = f"commprof calibrate --out {shlex.quote(str(runs.directory / 'calibration.json'))}"
    if chosen != NONE:
        text = f"There is no calibration {chosen[:200]!r} below {runs.directory}. Choose another above, or measure one:"
        return [messages.message("No such calibration", text, [command], severity="warning")]
    text = (
        "The ceiling of this machine is not known. Measure it while nothing else runs, with the run's number of "
        "ranks. This page finds files calibration*.json beside the runs:"
    )
    return [messages.message("No ceiling", text, [command])]


def _answers(
    measured: api.Bandwidths, op: str, group: str, rate: Rate, file: Path | None, scheme: Scheme
) -> list[Component]:
    if measured.sizes.empty:
        text = "No collective or message of this run went from one rank to another, so there is no bandwidth."
        return [messages.message("Nothing to show", text)]
    sizes, times = _only(measured.sizes, op, group), _only(measured.collectives, op, group)
    if sizes.empty:
        return [
            messages.message(
                "Nothing is chosen", "This run has no such operation among such ranks; choose above."
            )
        ]
    notes = measured.sizes.attrs["notes"]
    return [
        *_told(sizes, rate),
        _figure(sizes, times, rate, file, scheme),
        _tiles(sizes),
        *([messages.sentences("Before you compare", notes, severity="note")] if notes else []),
        _strange(times),
        *([] if file is None else [_fits(api.ceiling_fits(file))]),
    ]


def _only(frame: pd.DataFrame, op: str, group: str) -> pd.DataFrame:
    selected = frame if op == ALL else frame[frame["op"] == op]
    return selected if group == ALL else selected[selected["group_ranks"] == group]


def _told(sizes: pd.DataFrame, rate: Rate) -> list[Component]:
    """Return the bandwidth of one operation, group and size in one line.

    It is the combination that moved the most payload bytes among those whose time is known.
    """
    timed = sizes[sizes["time_ns"].notna()]
    if timed.empty:
        return []
    sent = timed["payload_bytes"].astype(float) * timed["collectives"]
    most = timed.assign(sent=sent).sort_values("sent", ascending=False, kind="stable").iloc[0]
    reached = format_rate(float(most[f"{rate.key}_bytes_per_s"]))
    share = "" if pd.isna(most["ceiling_share"]) else f", {_percent(most['ceiling_share'])} of the ceiling"
    about = f"{most['op']} of {api.format_bytes(most['payload_bytes'])} on ranks {most['group_ranks']}"
    text = f"{rate.name}{share}: {about}, which sends the most bytes with a known time."
    return [messages.line(reached, text)]


def _tiles(sizes: pd.DataFrame) -> Component:
    counts = {
        name: int(sizes[name].sum())
        for name in ("collectives", "timed", "slow", "fast", "impossible", "untimed")
    }
    shares = sizes[sizes["ceiling_share"].notna()]
    largest = shares.sort_values("payload_bytes").iloc[-1] if len(shares) else None
    return cards.tiles(
        [
            cards.tile(
                "Timed",
                format_count(counts["timed"]),
                f"of {counts['collectives']:,} collectives and messages",
            ),
            cards.tile(
                "Outliers",
                format_count(counts["slow"] + counts["fast"]),
                f"{counts['slow']:,} slow, {counts['fast']:,} fast",
            ),
            cards.tile(
                "Impossible", format_count(counts["impossible"]), "no time, or faster than the ceiling allows"
            ),
            cards.tile(
                "Of the ceiling",
                "not known" if largest is None else f"{100 * largest['ceiling_share']:.0f} %",
                "no calibration"
                if largest is None
                else f"{largest['op']} of {api.format_bytes(largest['payload_bytes'])}, the largest",
            ),
        ]
    )


def _figure(
    sizes: pd.DataFrame, times: pd.DataFrame, rate: Rate, file: Path | None, scheme: Scheme
) -> Component:
    title = f"{rate.name} against size"
    timed = sizes[sizes["time_ns"].notna()]
    if timed.empty:
        return messages.message(
            title,
            "The end of these collectives was not recorded. commprof records it for one asynchronous call in 251, "
            "and on GPUs by events, unless --completion-every is 0. Record more steps, without that option:",
            ["commprof run train.py"],
        )
    series = (
        timed.groupby(["op", "group_ranks"], sort=False)["collectives"]
        .sum()
        .sort_values(ascending=False, kind="stable")
    )
    drawn_keys = set(series.index[:_MOST_SERIES])
    drawn = timed[[key in drawn_keys for key in zip(timed["op"], timed["group_ranks"], strict=True)]]
    strange = times[times["verdict"].isin(_STRANGE)].head(_MOST_MARKS)
    curve = pd.DataFrame() if file is None else bandwidth_data.curve(file, drawn[drawn["ceiling_ns"].notna()])
    left = (
        ""
        if len(series) <= _MOST_SERIES
        else f" The {_MOST_SERIES} with most collectives of {len(series)} are drawn."
    )
    ceiling = "" if file is None else " Dashed: the ceiling of this machine from the calibration."
    return cards.figure_card(
        "bandwidth",
        title,
        f"{rate.name} of payload bytes ({rate.definition}). Each point is the median of one operation, group and size, from "
        f"the last arrival of its ranks to its end.{ceiling}{left}",
        bandwidth_chart.against_size(drawn, strange, curve, rate, scheme),
        sizes,
        [
            Field("op", "Operation"),
            Field("group_ranks", "Ranks"),
            Field("payload_bytes", "Payload", api.format_bytes, numeric=True),
            Field("collectives", "Collectives", format_count, numeric=True),
            Field("timed", "Timed", format_count, numeric=True),
            Field("time_ns", "Time", api.format_ns, numeric=True),
            Field("algbw_bytes_per_s", "Algorithm bandwidth", format_rate, numeric=True),
            Field("busbw_bytes_per_s", "Bus bandwidth", format_rate, numeric=True),
            Field("ceiling_busbw_bytes_per_s", "Ceiling (bus)", format_rate, numeric=True),
            Field("ceiling_share", "Of the ceiling", _percent, numeric=True),
            Field("time_source", "End known from"),
        ],
        most_rows=_TABLE_ROWS,
    )


def _strange(times: pd.DataFrame) -> Component:
    title = "Outliers and impossible times"
    outliers = times[times["verdict"].isin(_STRANGE)]
    if outliers.empty:
        return cards.empty_card(
            "strange", title, "There are none: every time is possible and close to the others of its kind."
        )
    order = outliers["verdict"].map({name: place for place, name in enumerate(_STRANGE)})
    outliers = outliers.assign(order=order).sort_values(
        ["order", "time_ns"], ascending=[True, False], kind="stable"
    )
    return cards.table_card(
        "strange",
        title,
        "Not in the averages. Slow and fast: beyond 3.5 robust standard deviations of their operation, group and size. "
        "Impossible: no time, or less than the interval of the ceiling allows; clock, times or calibration are wrong.",
        outliers.drop(columns="order"),
        [
            Field("verdict", "Verdict"),
            Field("op", "Operation"),
            Field("group_ranks", "Ranks"),
            Field("step", "Step", str, numeric=True),
            Field("purpose", "Purpose"),
            Field("payload_bytes", "Payload", api.format_bytes, numeric=True),
            Field("time_ns", "Time", api.format_ns, numeric=True),
            Field("ceiling_ns", "Ceiling", api.format_ns, numeric=True),
            Field("busbw_bytes_per_s", "Bus bandwidth", format_rate, numeric=True),
            Field("time_source", "End known from"),
        ],
        most_rows=_TABLE_ROWS,
    )


def _fits(frame: pd.DataFrame) -> Component:
    ends = ("latency_low_ns", "latency_high_ns", "busbw_low_bytes_per_s", "busbw_high_bytes_per_s")
    return cards.table_card(
        "ceiling",
        "The ceiling",
        "Fitted to the calibration: time = latency + payload / bandwidth, with 95 % intervals. Residual: the distance "
        "of the measured times from the fit.",
        frame,
        [
            Field("op", "Operation"),
            Field("sizes", "Sizes", format_count, numeric=True),
            Field("latency_ns", "Latency", api.format_ns, numeric=True),
            Field(ends[0], "from", api.format_ns, numeric=True),
            Field(ends[1], "to", api.format_ns, numeric=True),
            Field("busbw_bytes_per_s", "Bus bandwidth of large ones", format_rate, numeric=True),
            Field(ends[2], "from", format_rate, numeric=True),
            Field(ends[3], "to", format_rate, numeric=True),
            Field("residual", "Residual", _percent, numeric=True),
            Field("best_busbw_bytes_per_s", "Best measured", format_rate, numeric=True),
        ],
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


PAGE: Final = Page(
    "/bandwidth",
    "Bandwidth",
    "What bandwidth did collectives reach, and what can the machine reach?",
    order=100,
    render=render,
)
