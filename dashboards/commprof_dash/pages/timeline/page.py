"""The page Timeline: what every rank sent and when, from the whole run down to a single record."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import dash
import flask
import plotly.graph_objects as go
from dash import ALL, ClientsideFunction, Input, Output, State, dcc, html
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from commprof.analysis import api
from commprof.errors import CommprofError
from commprof_dash import address, ids
from commprof_dash.address import Query
from commprof_dash.charts import timeline_chart
from commprof_dash.components import cards, messages
from commprof_dash.components.graph import graph, height_of
from commprof_dash.data import Runs, reason
from commprof_dash.downloads import download
from commprof_dash.pages import index_wait
from commprof_dash.pages.index_wait import RUN, builds, waiting_for_index
from commprof_dash.pages.one_run import draw_run, no_records
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.pages.timeline.data import (
    View,
    heat_rows,
    hosts_of,
    is_folded,
    is_sorted_by_lateness,
    opened,
    path_of,
    timeline,
    view_in,
    view_of,
)
from commprof_dash.pages.timeline.minimap import minimap_card
from commprof_dash.pages.timeline.shown import CSV_PATH, below
from commprof_dash.pages.timeline.toolbar import BUTTON, BY, RANKS, RECORD, ROWS, STEP, toolbar
from commprof_dash.theme import Scheme, scheme_of

PATH: Final = "/timeline"
VIEW: Final = "timeline-view"  # the store of the view
WRITTEN: Final = "timeline-written"
SHOWN: Final = "timeline-shown"  # the content that changes with the view, besides the figure
HOVER: Final = "timeline-hover"  # a line that describes the item below the pointer
_BESIDE: Final = 560  # the pixels of the page above and below the figure


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """Return the page for the run and the view in ``query``."""

    def answers(name: str) -> tuple[list[Component], list[Component]]:
        return [], _answers(runs, name, view_in(query), scheme)

    return draw_run(runs, query, answers)


def _answers(runs: Runs, name: str, view: View, scheme: Scheme) -> list[Component]:
    path = path_of(runs, name)
    waiting = builds.wait_for(path)
    if waiting is not None:
        return waiting_for_index(waiting, name)
    if not api.index(path)["records"] and (nothing := no_records(runs, name)) is not None:
        return [nothing]
    view = opened(path, view)
    shown = timeline(path, view)
    figure = _figure(path, view, shown, scheme)
    return [
        dcc.Store(id=VIEW, data=view.stored() | _extent(path, view, shown) | {"drawn": True}),
        dcc.Store(id=RUN, data=name),
        dcc.Store(id=WRITTEN),
        cards.text_card(
            "timeline",
            "Ranks over time",
            "",
            [
                toolbar(
                    view,
                    shown,
                    len(set(hosts_of(path).values())),
                    is_folded(path, view),
                    is_sorted_by_lateness(path, view),
                ),
                minimap_card(path, shown),
                html.Div(
                    "Point at a bar to read it here. Drag, wheel or W, A, S, D move the window.",
                    id=HOVER,
                    className="timeline-hover",
                ),
                graph(
                    "timeline",
                    figure,
                    "Timeline of all ranks. The buttons above move it, and the table below has its numbers.",
                    zoomable=True,
                    beside=_BESIDE,
                ),
                html.Div(below(path, name, view, shown), id=SHOWN),
            ],
        ),
    ]


def _extent(path: Path, view: View, shown: api.Timeline) -> dict[str, int | None]:
    """Return the times that the browser needs to move the view, relative to the start of the run.

    They are the window, the step of the view, and the length of the run.
    """
    window = None if view.step is None else api.step_window(path, view.step)
    begin, end = (None, None) if window is None else (time - shown.run_begin_ns for time in window)
    return {
        "first": shown.begin_ns - shown.run_begin_ns,
        "last": shown.end_ns - shown.run_begin_ns,
        "length": shown.run_end_ns - shown.run_begin_ns,
        "step_first": begin,
        "step_last": end,
    }


def _figure(path: Path, view: View, shown: api.Timeline, scheme: Scheme) -> go.Figure:
    rows = heat_rows(path, view, shown)
    heat = None if rows is None else timeline_chart.Heat(*zip(*rows, strict=True)) if rows else None
    return timeline_chart.figure(shown, scheme, _selected(path, view), heat)


def _selected(path: Path, view: View) -> list[tuple[int, int, int, int]]:
    if view.record is None:
        return []
    rank, attempt, pid, seq = view.record
    details = api.record(path, rank, seq, attempt, pid)
    if details is None:
        return []
    names = ("rank", "attempt", "pid", "seq")
    return list(zip(*(details.partners[name].tolist() for name in names), strict=True)) or [view.record]


def register(app: dash.Dash, runs: Runs) -> None:
    """Add the callbacks that move through time, and the download of the displayed records."""
    index_wait.register(app, runs)

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
            figure = _figure(path, view, shown, scheme_of(scheme))
            return figure, height_of(figure, _BESIDE), below(path, name, view, shown)
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
        # The server looks up the window of a step. For all other moves, only the browser writes the view.
        try:
            path = path_of(runs, name)
            window = api.step_window(path, step) if isinstance(step, int) else None
            begin = api.index(path)["begin_ns"]
        except (KeyError, CommprofError):
            raise PreventUpdate from None  # the run was deleted, which the next drawing of the page shows
        if window is None or step == data.get("step"):
            raise PreventUpdate
        first, last = window[0] - begin, window[1] - begin
        window_now = {"from": first, "to": last, "first": first, "last": last}
        step_now = {"step": step, "step_first": first, "step_last": last}
        return data | window_now | step_now | {"drawn": False}

    app.clientside_callback(
        ClientsideFunction("timeline", "move"),
        Output(VIEW, "data"),
        Input(ids.graph("timeline"), "relayoutData"),
        Input(ids.graph("timeline"), "clickData"),
        Input({"type": BUTTON, "what": ALL}, "n_clicks"),
        Input(RANKS, "value"),
        Input(RECORD, "value"),
        State(VIEW, "data"),
        prevent_initial_call=True,
    )
    # Each control has its own callback, because only some runs have these controls, and Dash does not call a
    # callback with a missing input.
    for control in (ROWS, BY):
        app.clientside_callback(
            ClientsideFunction("timeline", "arrange"),
            Output(VIEW, "data", allow_duplicate=True),
            Input(control, "value"),
            State(VIEW, "data"),
            prevent_initial_call=True,
        )
    app.clientside_callback(
        ClientsideFunction("timeline", "hover"),
        Output(HOVER, "children"),
        Input(ids.graph("timeline"), "hoverData"),
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
    PATH,
    "Timeline",
    "What did every rank send when, and who waited for whom?",
    order=50,
    render=render,
    register=register,
)
