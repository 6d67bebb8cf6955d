"""Timeline: what every rank sent when, from the whole run down to a single record."""

from __future__ import annotations

from typing import Any, Final

import dash
import flask
import pandas as pd
from dash import ALL, ClientsideFunction, Input, Output, State, dcc, html
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from commprof.analysis import api
from commprof.schema import OPS
from commprof_dash import address, ids
from commprof_dash.address import Query
from commprof_dash.charts import timeline as chart
from commprof_dash.charts.density import OTHER_GROUPS, lane_names
from commprof_dash.charts.series import series_in_order, with_series
from commprof_dash.components import cards, messages, tables
from commprof_dash.components.graph import graph, height_of
from commprof_dash.components.tables import Field
from commprof_dash.data import Runs, reason
from commprof_dash.downloads import download
from commprof_dash.pages.one_run import draw_run, no_records
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.pages.timeline_record import record_section, shortened
from commprof_dash.theme import EXPOSED_COLOUR, OP_COLOURS, OTHER_COLOUR, Scheme, scheme_of
from commprof_dash.timeline_data import (
    Builds,
    View,
    path_of,
    record_text,
    timeline,
    view_in,
    view_of,
)

PATH: Final = "/timeline"
CSV_PATH: Final = "/timeline.csv"
VIEW: Final = "timeline-view"  # the store that holds what is shown
RUN: Final = "timeline-run"
WRITTEN: Final = "timeline-written"
STEP: Final = "timeline-step"
RANKS: Final = "timeline-ranks"
RECORD: Final = "timeline-record"
SHOWN: Final = "timeline-shown"  # what changes with the view, besides the figure
WAIT: Final = "timeline-wait"
WAITING: Final = "timeline-waiting"
_BUTTONS: Final = {
    "in": "Zoom in",
    "out": "Zoom out",
    "left": "Earlier",
    "right": "Later",
    "all": "Whole run",
}
_SIGNS: Final = {"in": "+", "out": "\u2212", "left": "\u2190", "right": "\u2192", "all": "Whole run"}
_ROWS_SHOWN: Final = 200
builds: Final = Builds()


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """The page for the run and the view in ``query``."""

    def answers(name: str) -> tuple[list[Component], list[Component]]:
        return [], _answers(runs, name, view_in(query), scheme)

    return draw_run(runs, query, answers)


def _answers(runs: Runs, name: str, view: View, scheme: Scheme) -> list[Component]:
    path = path_of(runs, name)
    waiting = builds.wait_for(path)
    if waiting is not None:
        return waiting_for_index(waiting, name)
    shown = timeline(path, view)
    if not shown.records and (nothing := no_records(runs, name)) is not None:
        return [nothing]
    figure = chart.figure(shown, scheme, _selected(path, view))
    return [
        dcc.Store(id=VIEW, data=view.stored() | _extent(shown) | {"drawn": True}),
        dcc.Store(id=RUN, data=name),
        dcc.Store(id=WRITTEN),
        cards.text_card(
            "timeline",
            "Ranks over time",
            "",
            [
                _toolbar(view, shown),
                graph(
                    "timeline",
                    figure,
                    "Timeline of all ranks. The buttons above move it, and the table below holds what it shows.",
                    zoomable=True,
                ),
                html.Div(_below(path, name, view, shown), id=SHOWN),
            ],
        ),
    ]


def waiting_for_index(progress: str, name: str) -> list[Component]:
    """What stands on a page while the index of a run is built."""
    text = f"The records of {name} are put in order, once: {progress}. This page goes on by itself when that is done."
    return [
        dcc.Interval(id=WAIT, interval=1000),
        dcc.Store(id=RUN, data=name),
        html.Div(messages.message("Getting ready", text), id=WAITING, role="status"),
    ]


def _extent(shown: api.Timeline) -> dict[str, int]:
    """What the buttons need to know: the window and the whole run, since its begin."""
    return {
        "first": shown.begin_ns - shown.run_begin_ns,
        "last": shown.end_ns - shown.run_begin_ns,
        "length": shown.run_end_ns - shown.run_begin_ns,
    }


def _selected(path: Any, view: View) -> list[tuple[int, int, int, int]]:
    if view.record is None:
        return []
    rank, attempt, pid, seq = view.record
    found = api.record(path, rank, seq, attempt, pid)
    if found is None:
        return []
    names = ("rank", "attempt", "pid", "seq")
    return list(zip(*(found.partners[name].tolist() for name in names), strict=True)) or [view.record]


def _toolbar(view: View, shown: api.Timeline) -> Component:
    buttons = [
        html.Button(
            _SIGNS[what],
            id={"type": "timeline-button", "what": what},
            className="tool",
            title=title,
            type="button",
            **{"aria-label": title},
        )
        for what, title in _BUTTONS.items()
    ]
    return html.Div(
        [
            *buttons,
            html.Label(
                [
                    "Step ",
                    dcc.Input(id=STEP, type="number", min=0, step=1, debounce=True, className="tool-input"),
                ]
            ),
            html.Label(
                [
                    "Ranks ",
                    dcc.Input(
                        id=RANKS,
                        type="text",
                        debounce=True,
                        value=view.ranks,
                        placeholder=_ranks_text(shown.run_ranks),
                        className="tool-input",
                    ),
                ]
            ),
            html.Label(
                [
                    "Record ",
                    dcc.Input(
                        id=RECORD,
                        type="text",
                        debounce=True,
                        value=view.stored()["record"],
                        placeholder="its key",
                        className="tool-input",
                    ),
                ]
            ),
        ],
        className="toolbar",
        role="group",
        **{"aria-label": "Move the timeline"},
    )


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else ", ".join(map(str, ranks))


def _below(path: Any, name: str, view: View, shown: api.Timeline) -> list[Component]:
    """What stands below the figure: what it shows, its legend, its table, and the record that was chosen."""
    return [
        html.P(_said(shown), className="card-subtitle", role="status"),
        _legend(shown),
        *([] if view.record is None else [record_section(path, name, view.record, shown.run_begin_ns)]),
        html.Details(
            [html.Summary(_rows_told(shown)), _csv_link(name, view), *_table(name, view, shown)],
            className="card-table",
        ),
    ]


def _rows_told(shown: api.Timeline) -> str:
    if shown.bars is None:
        return "Table (sums over the window)"
    return f"Table ({len(shown.bars):,} rows)"


def _said(shown: api.Timeline) -> str:
    window = shown.end_ns - shown.begin_ns
    if shown.bars is not None:
        what = f"{len(shown.bars):,} records, each as a bar from its issue until the last that is known of it"
    else:
        where = " in each of its groups, the largest group above" if shown.lanes else ""
        what = (
            f"How busy each rank was{where}: the colour is the operation that took most of the time, its strength the "
            "share; the narrow row below is the time that the program stood still. Zoom in to see the "
            f"{shown.records:,} records"
        )
    text = (
        f"{what}. Window: {api.format_ns(window)} of {api.format_ns(shown.run_end_ns - shown.run_begin_ns)}."
    )
    hidden = len(shown.run_ranks) - len(shown.ranks)
    if hidden:
        text += f" {len(shown.ranks):,} of {len(shown.run_ranks):,} ranks are shown."
    text += _said_of_lanes(shown)
    if shown.unknown_clocks:
        text += (
            f" {shown.unknown_clocks:,} records are of hosts whose clocks were never compared: they stand where their own "
            "clock says."
        )
    if shown.bands.empty:
        text += " Steps and phases appear when you zoom in, where the run has any."
    return text


def _said_of_lanes(shown: api.Timeline) -> str:
    """Which groups have no lane of their own."""
    joined = sorted({lane.groups for lane in shown.lanes if lane.groups > 1})
    text = ""
    if joined:
        count = f"{joined[0]:,}" if len(joined) == 1 else f"{joined[0]:,} to {joined[-1]:,}"
        text += f" The busiest groups of a rank have a lane each, its {count} others one together: {OTHER_GROUPS}."
    if shown.hidden_lanes:
        text += f" Their groups would be {shown.hidden_lanes:,} lanes: choose fewer ranks to see them."
    return text


def _legend(shown: api.Timeline) -> Component:
    entries: list[tuple[str, str, str]]
    if shown.bars is not None:
        named = series_in_order(with_series(shown.bars)["series"])
        entries = [(one.name, one.colour, "swatch hatched" if one.hatch else "swatch") for one in named]
    else:
        ops = set() if shown.density is None else set(shown.density["op"])
        entries = [(op, OP_COLOURS.get(op, OTHER_COLOUR), "swatch") for op in OPS if op in ops]
    items = [
        html.Li([html.Span(className=looks, style={"backgroundColor": colour}), name])
        for name, colour, looks in entries
    ]
    held = {"border": f"2px solid {EXPOSED_COLOUR}"}
    items.append(html.Li([html.Span(className="swatch", style=held), chart.HELD]))
    if (shown.bands["kind"] == "step").any():
        shade = {"backgroundColor": "var(--line)"}
        items.append(html.Li([html.Span(className="swatch", style=shade), "every second training step"]))
    phases = dict.fromkeys(shown.bands[shown.bands["kind"] == "phase"]["name"])
    items += [
        html.Li(
            [
                html.Span(
                    className="swatch band",
                    style={"backgroundColor": chart.PHASE_COLOURS.get(phase, OTHER_COLOUR)},
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
        Field("exposed_ns", "Stood still", api.format_ns, numeric=True),
        Field("payload_bytes", "Payload bytes", api.format_bytes, numeric=True),
        Field("step", "Step", str, numeric=True),
        Field("phase", "Phase"),
        Field("purpose", "Purpose"),
        Field("bucket", "Bucket", str, numeric=True),
        Field("pg", "Group", shortened),
        # Text, not a link: a link in each row keeps the browser busy for seconds. The tool bar goes to a record.
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
        Field("exposed_ns", "Stood still", api.format_ns, numeric=True),
    ]
    if not shown.lanes:
        return [tables.table(sums.head(_ROWS_SHOWN), fields, "Busy time of the window by rank and operation")]
    names = lane_names(shown)
    members = {(lane.rank, lane.lane): lane.group_ranks or "several" for lane in shown.lanes}
    lanes = list(zip(sums["rank"].tolist(), sums["lane"].tolist(), strict=True))
    sums = sums.assign(group=[names[lane] for lane in lanes], members=[members[lane] for lane in lanes])
    fields[1:1] = [Field("group", "Group", shortened), Field("members", "Its ranks", shortened)]
    first = f"The first {_ROWS_SHOWN} of {len(sums):,} sums." if len(sums) > _ROWS_SHOWN else ""
    told = "Busy time of the window by rank, group and operation"
    return [html.P(first, className="muted"), tables.table(sums.head(_ROWS_SHOWN), fields, told)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _address(name: str, view: View, path: str = PATH, **changed: str) -> str:
    held = {key: str(value) for key, value in view.stored().items() if value not in (None, "")}
    return address.link(path, run=name, **(held | changed))


def _csv_link(name: str, view: View) -> Component:
    return html.A(
        "CSV",
        href=_address(name, view, CSV_PATH),
        download="commprof-timeline.csv",
        className="card-action",
        title="Download what the figure shows as CSV",
    )


def register(app: dash.Dash, runs: Runs) -> None:
    """The callbacks of moving through time, and the file of what is shown."""

    @app.callback(
        Output(ids.graph("timeline"), "figure"),
        Output(ids.graph("timeline"), "style"),
        Output(SHOWN, "children"),
        Input(VIEW, "data"),
        State(RUN, "data"),
        State(ids.SCHEME, "data"),
        prevent_initial_call=True,
    )
    def move(data: dict[str, Any] | None, name: str, scheme: str | None) -> tuple[Any, ...]:
        if not data or data.get("drawn"):
            raise PreventUpdate
        view = view_of(data)
        try:
            path = path_of(runs, name)
            shown = timeline(path, view)
            figure = chart.figure(shown, scheme_of(scheme), _selected(path, view))
            return figure, height_of(figure), _below(path, name, view, shown)
        except KeyError:
            return dash.no_update, dash.no_update, [messages.unknown_runs([name], str(runs.directory))]
        except Exception as error:
            return dash.no_update, dash.no_update, [messages.broken_page(reason(error))]

    @app.callback(
        Output(VIEW, "data", allow_duplicate=True),
        Input(STEP, "value"),
        State(VIEW, "data"),
        State(RUN, "data"),
        prevent_initial_call=True,
    )
    def go_to_step(step: Any, data: dict[str, Any], name: str) -> dict[str, Any]:
        path = path_of(runs, name)
        window = api.step_window(path, step) if isinstance(step, int) else None
        if window is None:
            raise PreventUpdate
        begin = api.index(path)["begin_ns"]
        first, last = window[0] - begin, window[1] - begin
        return data | {"from": first, "to": last, "first": first, "last": last, "drawn": False}

    @app.callback(
        Output(WAITING, "children"),
        Output(WAIT, "disabled"),
        Input(WAIT, "n_intervals"),
        State(RUN, "data"),
        prevent_initial_call=True,
    )
    def waited(_: int, name: str) -> tuple[Any, bool]:
        try:
            waiting = builds.wait_for(path_of(runs, name))
        except Exception as error:
            return messages.broken_page(reason(error)), True
        if waiting is None:
            return messages.message("Ready", "The records are in order."), True
        return waiting_for_index(waiting, name)[-1].children, False

    app.clientside_callback(
        ClientsideFunction("timeline", "wait"),
        Output(RUN, "data"),
        Input(WAIT, "disabled"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        ClientsideFunction("timeline", "move"),
        Output(VIEW, "data"),
        Input(ids.graph("timeline"), "relayoutData"),
        Input(ids.graph("timeline"), "clickData"),
        Input({"type": "timeline-button", "what": ALL}, "n_clicks"),
        Input(RANKS, "value"),
        Input(RECORD, "value"),
        State(VIEW, "data"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        ClientsideFunction("timeline", "write"),
        Output(WRITTEN, "data"),
        Input(VIEW, "data"),
        State(RUN, "data"),
    )

    @app.server.route(CSV_PATH)
    def timeline_csv() -> flask.Response:
        query = address.parse(flask.request.query_string.decode("utf-8", "replace"))
        try:
            path = path_of(runs, next(iter(query.get(address.RUN, ())), ""))
            shown = timeline(path, view_in(query))
        except KeyError:
            return flask.Response("There is no such run.\n", 404, mimetype="text/plain")
        except Exception as error:
            return flask.Response(reason(error) + "\n", 422, mimetype="text/plain")
        frame = shown.bars if shown.bars is not None else shown.density
        assert frame is not None
        return download("commprof-timeline.csv", iter([api.frame_csv(frame).encode()]))


PAGE: Final = Page(
    PATH, "Timeline", "What did every rank send when, and who waited for whom?", render, register
)
