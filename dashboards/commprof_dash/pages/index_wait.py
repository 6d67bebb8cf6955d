"""Builds the notice that a page shows while the index of its run is built."""

from __future__ import annotations

from typing import Any, Final

import dash
from dash import ClientsideFunction, Input, Output, State, dcc, html
from dash.development.base_component import Component

from commprof_dash.components import messages
from commprof_dash.data import Runs, reason
from commprof_dash.pages.timeline.data import Builds, path_of

RUN: Final = "timeline-run"
WAIT: Final = "timeline-wait"
WAITING: Final = "timeline-waiting"
builds: Final = Builds()


def waiting_for_index(progress: str, name: str) -> list[Component]:
    """Return the body of the page: the progress of the index, which is polled every second."""
    text = f"Indexing {name} (first open only): {progress}. The page refreshes when done."
    return [
        dcc.Interval(id=WAIT, interval=1000),
        dcc.Store(id=RUN, data=name),
        html.Div(messages.message("Getting ready", text), id=WAITING, role="status"),
    ]


def register(app: dash.Dash, runs: Runs) -> None:
    """Add the callbacks of the notice."""

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
            return messages.message("Ready", "Indexing is done."), True
        return waiting_for_index(waiting, name)[-1].children, False

    app.clientside_callback(
        ClientsideFunction("timeline", "wait"),
        Output(RUN, "data"),
        Input(WAIT, "disabled"),
        prevent_initial_call=True,
    )
