"""Builds the content below the timeline's figure: text, legend, table and the selected record."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pandas as pd
from dash import html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof.schema import OPS
from commprof_dash import address
from commprof_dash.charts import timeline_chart
from commprof_dash.charts.density_chart import OTHER_GROUPS, lane_names
from commprof_dash.charts.series import series_in_order, with_series
from commprof_dash.components import tables
from commprof_dash.components.folds import fold
from commprof_dash.components.tables import Field
from commprof_dash.pages.timeline.data import View, heat_rows, record_text
from commprof_dash.pages.timeline.record import record_section, shortened
from commprof_dash.theme import EXPOSED_COLOUR, OP_COLOURS, OTHER_COLOUR

CSV_PATH: Final = "/timeline.csv"
_ROWS_SHOWN: Final = 200


def below(path: Path, name: str, view: View, shown: api.Timeline) -> list[Component]:
    """Return all content below the figure, for the run called ``name`` at ``path``."""
    is_heat = heat_rows(path, view, shown) is not None
    return [
        html.P(_said(shown, is_heat), className="card-subtitle", role="status"),
        _legend(shown, is_heat),
        *([] if view.record is None else [record_section(path, name, view.record, shown.run_begin_ns)]),
        fold(_rows_told(shown), [_csv_link(name, view), *_table(name, view, shown)]),
    ]


def _rows_told(shown: api.Timeline) -> str:
    if shown.bars is None:
        return "Table (sums over the window)"
    return f"Table ({tables.rows_text(len(shown.bars))})"


def _said(shown: api.Timeline, is_heat: bool) -> str:
    window = shown.end_ns - shown.begin_ns
    if shown.bars is not None:
        of_all = f" of {shown.records:,}" if shown.records != len(shown.bars) else ""
        what = f"{len(shown.bars):,}{of_all} records, each as a bar from its issue to its last known time"
    elif is_heat:
        what = (
            "Stronger colors mean a larger share of exposed communication. A click on a row shows the ranks of "
            f"its host. {shown.records:,} records"
        )
    else:
        where = " in each of its groups, the largest group above" if shown.lanes else ""
        what = (
            f"How busy each rank was{where}: the color shows the operation that took most of the time, its strength "
            f"the busy share; the narrow row below is exposed communication. Zoom in to see the {shown.records:,} "
            "records"
        )
    text = (
        f"{what}. Window: {api.format_ns(window)} of {api.format_ns(shown.run_end_ns - shown.run_begin_ns)}."
    )
    hidden = len(shown.run_ranks) - len(shown.ranks)
    if hidden:
        text += f" {len(shown.ranks):,} of {len(shown.run_ranks):,} ranks are shown."
    text += _lanes_note(shown)
    if shown.unknown_clocks:
        text += (
            f" {shown.unknown_clocks:,} records are from hosts whose clocks were never compared: they are placed by "
            "their own clocks."
        )
    if shown.bands.empty:
        text += " Steps and phases appear when you zoom in, if the run has any."
    return text


def _lanes_note(shown: api.Timeline) -> str:
    """Return a sentence about the groups that have no separate lane."""
    joined = sorted({lane.groups for lane in shown.lanes if lane.groups > 1})
    text = ""
    if joined:
        count = f"{joined[0]:,}" if len(joined) == 1 else f"{joined[0]:,} to {joined[-1]:,}"
        text += f" The busiest groups of a rank have a lane each; its {count} other groups share one: {OTHER_GROUPS}."
    if shown.hidden_lanes:
        text += (
            f" The groups of these ranks need {shown.hidden_lanes:,} lanes: choose fewer ranks to see them."
        )
    return text


def _legend(shown: api.Timeline, is_heat: bool) -> Component:
    entries: list[tuple[str, str, str]]
    if shown.bars is not None:
        named = series_in_order(with_series(shown.bars)["series"])
        entries = [(one.name, one.colour, "swatch hatched" if one.hatch else "swatch") for one in named]
    else:
        ops = set() if is_heat or shown.density is None else set(shown.density["op"])
        entries = [(op, OP_COLOURS.get(op, OTHER_COLOUR), "swatch") for op in OPS if op in ops]
    items = [
        html.Li([html.Span(className=looks, style={"backgroundColor": colour}), name])
        for name, colour, looks in entries
    ]
    swatch = {
        "backgroundColor" if is_heat else "border": EXPOSED_COLOUR
        if is_heat
        else f"2px solid {EXPOSED_COLOUR}"
    }
    items.append(html.Li([html.Span(className="swatch", style=swatch), timeline_chart.EXPOSED]))
    if (shown.bands["kind"] == "step").any():
        shade = {"backgroundColor": "var(--line)"}
        items.append(html.Li([html.Span(className="swatch", style=shade), "every second training step"]))
    phases = dict.fromkeys(shown.bands[shown.bands["kind"] == "phase"]["name"])
    items += [
        html.Li(
            [
                html.Span(
                    className="swatch band",
                    style={"backgroundColor": timeline_chart.PHASE_COLOURS.get(phase, OTHER_COLOUR)},
                ),
                f"{phase} phase",
            ]
        )
        for phase in phases
    ]
    return html.Ul(items, className="legend")


def _table(name: str, view: View, shown: api.Timeline) -> list[Component]:
    origin = shown.run_begin_ns
    if shown.bars is None:
        assert shown.density is not None
        return _sums_table(shown, shown.density)
    frame = shown.bars.head(_ROWS_SHOWN)
    frame = frame.assign(
        at=frame["begin_ns"] - origin,
        lasted=frame["end_ns"] - frame["begin_ns"],
        key=[
            record_text(key)
            for key in zip(*(frame[one].tolist() for one in ("rank", "attempt", "pid", "seq")), strict=True)
        ],
    )
    fields = [
        Field("rank", "Rank", str, numeric=True),
        Field("op", "Operation"),
        Field("at", "At", api.format_ns, numeric=True),
        Field("lasted", "Lasted", api.format_ns, numeric=True),
        Field("exposed_ns", "Exposed", api.format_ns, numeric=True),
        Field("payload_bytes", "Payload bytes", api.format_bytes, numeric=True),
        Field("step", "Step", str, numeric=True),
        Field("phase", "Phase"),
        Field("purpose", "Purpose"),
        Field("bucket", "Bucket", str, numeric=True),
        Field("pg", "Group", shortened),
        # This is text and not a link, because a link in each row keeps the browser busy for seconds. The
        # toolbar can open a record.
        Field("key", "Record"),
    ]
    first = f"The first {_ROWS_SHOWN} of them; the CSV file has all." if len(shown.bars) > _ROWS_SHOWN else ""
    return [html.P(first, className="muted"), tables.table(frame, fields, "Records of the window")]


def _sums_table(shown: api.Timeline, density: pd.DataFrame) -> list[Component]:
    keys = ["rank", "lane", "op"] if shown.lanes else ["rank", "op"]
    sums = density.groupby(keys, as_index=False)[["busy_ns", "exposed_ns"]].sum()
    sums = sums.assign(busy_share=sums["busy_ns"] / max(1, shown.end_ns - shown.begin_ns))
    fields = [
        Field("rank", "Rank", str, numeric=True),
        Field("op", "Operation"),
        Field("busy_ns", "Busy", api.format_ns, numeric=True),
        Field("busy_share", "Part of the window", _percent, numeric=True),
        Field("exposed_ns", "Exposed", api.format_ns, numeric=True),
    ]
    if not shown.lanes:
        return [tables.table(sums.head(_ROWS_SHOWN), fields, "Busy time of the window by rank and operation")]
    names = lane_names(shown)
    members = {(lane.rank, lane.lane): lane.group_ranks or "several" for lane in shown.lanes}
    lanes = list(zip(sums["rank"].tolist(), sums["lane"].tolist(), strict=True))
    sums = sums.assign(group=[names[lane] for lane in lanes], members=[members[lane] for lane in lanes])
    fields[1:1] = [Field("group", "Group", shortened), Field("members", "Its ranks", shortened)]
    first = f"The first {_ROWS_SHOWN} of {len(sums):,} sums." if len(sums) > _ROWS_SHOWN else ""
    caption = "Busy time of the window by rank, group and operation"
    return [html.P(first, className="muted"), tables.table(sums.head(_ROWS_SHOWN), fields, caption)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _csv_link(name: str, view: View) -> Component:
    query = {key: str(value) for key, value in view.stored().items() if value not in (None, "")}
    return html.A(
        "CSV",
        href=address.link(CSV_PATH, run=name, **query),
        download="commprof-timeline.csv",
        className="card-action",
        title="Download what the figure shows as CSV",
    )
