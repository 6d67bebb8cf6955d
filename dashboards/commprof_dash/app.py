"""The Dash application: the shell around the pages, and the callback that draws the page of an address."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import dash
import dash_ag_grid as dag
import flask
from dash import ALL, ClientsideFunction, Input, Output, State, dcc
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate
from dash.fingerprint import build_fingerprint

from commprof.errors import CommprofError
from commprof_dash import address, ids
from commprof_dash.access import Access, guard
from commprof_dash.charts.labels import on_screen
from commprof_dash.components import controls, messages, shell
from commprof_dash.data import Runs, reason
from commprof_dash.early_drawings import EarlyDrawings
from commprof_dash.malformed import refuse_malformed
from commprof_dash.pages import PAGES
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.theme import scheme_of

_LOG: Final = logging.getLogger(__name__)

_INDEX: Final = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<title>{%title%}</title>
<link rel="icon" type="image/svg+xml" href="assets/icon.svg">
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>"""


class _Drawn(NamedTuple):
    """A page with its heading, and the stamp that the runs directory had before the page was drawn."""

    stamp: str
    heading: list[Component]
    drawing: Drawing


class _Application(dash.Dash):
    """The Dash application, which starts two tasks of a page early, when the HTML of the page is requested.

    The two tasks are drawing the page and loading the JavaScript of its grid. By default, Dash requests this
    JavaScript only when the first grid is drawn, after the server's answer, and the grid then waits until the
    code is compiled. Dash does not request a webpack chunk again if the browser has loaded it already.
    """

    early: EarlyDrawings[_Drawn]

    def interpolate_index(self, **parts: Any) -> str:
        page = find_page(flask.request.path)
        if page is not None:
            query = flask.request.query_string.decode("ascii", "replace")
            self.early.begin(flask.request.path, f"?{query}" if query else "")
        code = _grid_code() if page is not None and page.has_grid else None
        if code is not None:
            chunk = self.get_relative_path(f"/_dash-component-suites/{code}")
            parts["metas"] = f'{parts["metas"]}\n<script async src="{chunk}"></script>'
        html: str = super().interpolate_index(**parts)
        return html


@cache
def _grid_code() -> str | None:
    """Return the URL path of the grid's JavaScript, with its version and modification time, so that browsers cache it.

    Return None if the installed version of the grid uses another file name. Dash then requests the file later.
    """
    file = Path(dag.__file__).with_name("async-community.js")
    if not file.exists():
        return None
    name = f"{dag.__name__}/{file.name}"
    return build_fingerprint(name, dag.__version__, int(file.stat().st_mtime))


def create_app(runs_dir: Path | str, access: Access | None = None) -> dash.Dash:
    """Return the dashboard of the runs below ``runs_dir``, which may be empty or missing.

    The pages load everything from this application and nothing from other servers. Serve ``app.server`` (WSGI),
    for example with waitress.

    Args:
        runs_dir: The directory of the runs.
        access: The conditions for requests; by default, requests of browsers on this machine are answered.
    """
    runs = Runs(Path(runs_dir))
    app = _Application(
        __name__,
        title="commprof",
        update_title=None,
        serve_locally=True,
        compress=True,
        index_string=_INDEX,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
        suppress_callback_exceptions=True,  # controls exist only on their pages
    )
    guard(app.server, access or Access())
    refuse_malformed(app.server)
    app.layout = shell.layout(PAGES)

    def drawn(pathname: str | None, search: str, scheme: str | None) -> _Drawn:
        stamp = runs.stamp()
        with on_screen(scheme):
            return _Drawn(stamp, *draw_page(find_page(pathname), runs, pathname, search, scheme))

    app.early = EarlyDrawings(drawn)
    _register(app, runs, drawn)
    return app


def _register(
    app: _Application, runs: Runs, draw_now: Callable[[str | None, str, str | None], _Drawn]
) -> None:
    @app.callback(
        Output(ids.HEADING, "children"),
        Output(ids.CONTROLS, "children"),
        Output(ids.BODY, "children"),
        Output(ids.NAVIGATION, "children"),
        Output(ids.TICK, "disabled"),
        Input(ids.ADDRESS, "pathname"),
        Input(ids.ADDRESS, "search"),
        Input(ids.SCHEME, "data"),
        Input(ids.FOLLOW, "data"),
        State(ids.drawn(ALL), "data"),
        State(ids.control(ALL), "value"),
        State(ids.control(ALL), "id"),
    )
    def draw(
        pathname: str | None,
        search: str | None,
        scheme: str | None,
        follow: dict[str, Any] | None,
        drawn: list[dict[str, Any]],
        values: list[Any],
        control_ids: list[dict[str, str]],
    ) -> tuple[Any, ...]:
        page = find_page(pathname)
        if dash.ctx.triggered_id == ids.FOLLOW and drawn and follow:
            if drawn[0].get("stamp") == runs.stamp():
                # Nothing was written since the last drawing, so the page does not change.
                raise PreventUpdate
            # The timeline and the grid write the query without requesting the page again.
            search = follow["search"]
        search = _with_kept(search, drawn[0] if drawn else {}, pathname)
        early = None if drawn else app.early.take(pathname or "/", search, scheme)
        stamp, heading, drawing = early or draw_now(pathname, search, scheme)
        # The browser keeps the description of the drawn page, so that the next call can decide which controls
        # to replace.
        now = {
            "page": pathname,
            "held": controls.values_by_key(drawing.controls),
            "stamp": stamp,
            "kept": (address.RUN, drawing.run) if drawing.run else drawing.kept,
            "title": title(page, drawing.run, search),
        }
        shown = {identity["key"]: value for identity, value in zip(control_ids, values, strict=True)}
        # Existing controls with the right values are not replaced, so that an open list is not closed.
        stay = bool(drawn) and drawn[0]["page"] == pathname and shown == now["held"]
        return (
            heading,
            dash.no_update if stay else drawing.controls,
            [dcc.Store(id=ids.drawn("body"), data=now), *drawing.body],
            shell.navigation(PAGES, page, address.parse(_with_kept(search, now, pathname))),
            not drawing.follows,
        )

    for page in PAGES:
        if page.register is not None:
            page.register(app, runs)
    app.clientside_callback(
        ClientsideFunction("scheme", "watch"), Output(ids.SCHEME, "data"), Input(ids.SCHEME, "id")
    )
    app.clientside_callback(
        ClientsideFunction("address", "write"),
        Output(ids.ADDRESS_WRITTEN, "data"),
        Input(ids.control(ALL), "value"),
        State(ids.control(ALL), "id"),
        State(ids.drawn(ALL), "data"),
    )
    app.clientside_callback(
        ClientsideFunction("shell", "follow"),
        Output(ids.FOLLOW, "data"),
        Input(ids.TICK, "n_intervals"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        ClientsideFunction("shell", "depart"),
        Input(ids.ADDRESS, "pathname"),
        Input(ids.ADDRESS, "search"),
        State(ids.PAGES, "data"),
        State(ids.drawn(ALL), "data"),
    )
    app.clientside_callback(
        ClientsideFunction("shell", "arrive"),
        Output(ids.ARRIVED, "data"),
        Input(ids.drawn(ALL), "data"),
    )
    app.clientside_callback(
        ClientsideFunction("shell", "toggle_menu"),
        Output(ids.SHELL, "navbar"),
        Input(ids.MENU_BUTTON, "opened"),
        Input(ids.ADDRESS, "pathname"),
        State(ids.SHELL, "navbar"),
    )


def _with_kept(search: str | None, drawn: dict[str, Any], pathname: str | None) -> str:
    """Return ``search`` with the run, or the choice of runs, that the page showed before, if ``search`` names none.

    This way, a run that starts does not replace the run that the user is looking at.
    """
    search = search or ""
    named = address.parse(search)
    if not drawn.get("kept") or drawn.get("page") != pathname:
        return search
    key, value = drawn["kept"]
    if key in named or address.RUN in named or (key != address.RUN and address.TICK in named):
        return search
    return address.link("", **{key: value}) + search.replace("?", "&", 1)


def title(page: Page | None, run: str, search: str | None) -> str:
    """Return the title of the document: the page and its run.

    The run is first where the browser truncates the title.
    """
    named = address.parse(search).get(address.RUN, ())
    about = run or (named[0] if len(named) == 1 else f"{len(named)} runs" if named else "")
    name = "No such page" if page is None else page.title
    about = "" if page is not None and page.path == "/" else about[:200]
    return " \u00b7 ".join(part for part in (name, about, "commprof") if part)


def find_page(pathname: str | None) -> Page | None:
    """Return the page at ``pathname``; None if there is none."""
    wanted = "/" + (pathname or "/").strip("/")
    return next((page for page in PAGES if page.path == wanted), None)


def draw_page(
    page: Page | None, runs: Runs, pathname: str | None, search: str | None, scheme: str | None
) -> tuple[list[Component], Drawing]:
    """Return the heading and the page of an address. An error becomes a message instead of the page."""
    if page is None:
        text = f"The dashboard has no page {(pathname or '')[:200]!r}. Choose one from the menu."
        notice = messages.message("No such page", text, severity="warning")
        return shell.heading("No such page", ""), Drawing([], [notice])
    try:
        drawing = page.render(runs, address.parse(search), scheme_of(scheme))
    except CommprofError as error:
        drawing = Drawing([], [messages.unanswered_page(reason(error))])
    # An error in one page must not affect other pages, and must not leave the old page visible.
    except Exception as error:
        _LOG.exception("page %s with %s could not be drawn", page.path, search)
        drawing = Drawing([], [messages.broken_page(reason(error))])
    return shell.heading(page.title, page.question), drawing
