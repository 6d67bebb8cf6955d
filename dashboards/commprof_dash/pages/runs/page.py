"""Runs: all runs below the directory: what ran, how they differ, how complete they are. Ticked runs go to Compare."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import dash_mantine_components as dmc
import pandas as pd
from dash import ClientsideFunction, Input, Output, State, dcc, html
from dash.development.base_component import Component

from commprof_dash import address
from commprof_dash.address import Query
from commprof_dash.components import cards, messages
from commprof_dash.components.tables import Cell, csv_link
from commprof_dash.data import Runs
from commprof_dash.measures import format_count
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.theme import Scheme

if TYPE_CHECKING:
    import dash

TICKED: Final = "runs-ticked"
COMPARE: Final = "runs-compare"
COMPARE_COUNT: Final = "runs-compare-count"
TICK: Final = "tick"

_MOST_ROWS: Final = 500
_COLOURS: Final = {
    "complete": "teal",
    "running": "indigo",
    "failed": "red",
    "killed": "orange",
    "unreadable": "red",
}


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """All runs, the newest first, those in the address ticked."""
    listing = runs.listing()
    if listing.empty:
        return Drawing([], [messages.no_runs(str(runs.directory))], follows=True)
    shown = listing.head(_MOST_ROWS)
    names = set(listing["name"])
    ticked = [name for name in query.get(TICK, ()) if name in names]
    going = bool((listing["state"] == "running").any())
    return Drawing([], [_tiles(listing), _table(shown, listing, ticked)], follows=going)


def _tiles(listing: pd.DataFrame) -> Component:
    states = listing["state"].value_counts()
    bad = [f"{count} {state}" for state, count in states.items() if state not in ("complete", "running")]
    lost = int(listing["lost"].fillna(0).sum())
    return cards.tiles(
        [
            cards.tile("Runs", format_count(len(listing)), f"{states.get('complete', 0)} complete"),
            cards.tile("Going on", format_count(states.get("running", 0)), "this page follows them"),
            cards.tile(
                "Not whole",
                format_count(sum(states) - states.get("complete", 0) - states.get("running", 0)),
                ", ".join(bad) or "none",
            ),
            cards.tile("Records lost", format_count(lost), "over all runs"),
        ]
    )


def _table(shown: pd.DataFrame, listing: pd.DataFrame, ticked: list[str]) -> Component:
    head = [html.Th(heading, scope="col", className=kind) for heading, kind in _HEADINGS]
    rows = [_row(row) for row in shown.to_dict("records")]
    title = "All runs"
    cut = (
        ""
        if len(shown) == len(listing)
        else f" The newest {len(shown):,} of {len(listing):,}; the CSV file has all."
    )
    table = dmc.Table(
        [html.Caption(title, className="visually-hidden"), html.Thead(html.Tr(head)), html.Tbody(rows)],
        highlightOnHover=True,
        tabularNums=True,
        verticalSpacing=6,
        className="data-table runs-table",
    )
    return dmc.Paper(
        html.Section(
            [
                html.Div(
                    [html.H2(title, id="card-runs-title"), csv_link("runs", listing)], className="card-head"
                ),
                html.P(f"Tick runs to compare them.{cut}", className="card-subtitle"),
                html.Div(
                    [
                        dcc.Link("Compare", id=COMPARE, href=_compare_link(ticked), className="button"),
                        html.Span(_compare_count(ticked), id=COMPARE_COUNT, role="status", className="muted"),
                    ],
                    className="row-actions",
                ),
                dmc.CheckboxGroup(
                    html.Div(
                        table, className="table-scroll", tabIndex=0, role="group", **{"aria-label": title}
                    ),
                    id=TICKED,
                    value=ticked,
                ),
            ],
            **{"aria-labelledby": "card-runs-title"},
        ),
        id="card-runs",
        className="card",
        withBorder=True,
    )


_HEADINGS: Final = (
    (html.Span("Compare", className="visually-hidden"), "text"),
    ("Run", "text"),
    ("Health", "text"),
    ("What ran", "text"),
    ("Setting", "text"),
    ("Ranks", "number"),
    ("Steps", "number"),
    ("Records", "number"),
    ("Lost, unseen", "number"),
    ("Started", "text"),
)


def _row(row: dict[Any, Any]) -> Component:
    name = str(row["name"])
    broken = row["state"] == "unreadable"
    cells: list[tuple[Cell, str]] = [
        (
            dmc.Checkbox(
                value=name, disabled=broken, size="xs", radius="sm", **{"aria-label": f"Compare {name}"}
            ),
            "text",
        ),
        (
            html.Span(name) if broken else dcc.Link(name, href=address.link("/overview", run=name)),
            "text run-name",
        ),
        (_health(row), "text"),
        (_text(row["script"]), "text"),
        (_text(row["setting"]), "text wrap"),
        (_number(row["world_size"]), "number"),
        (_number(row["steps"]), "number"),
        (_number(row["records"]), "number"),
        ("-" if broken else f"{_number(row['lost'])}, {_number(row['unseen'])}", "number"),
        (_moment(row["started_realtime_ns"]), "text"),
    ]
    return html.Tr([html.Td(cell, className=kind) for cell, kind in cells])


def _health(row: dict[Any, Any]) -> Component:
    note = row["note"] if isinstance(row["note"], str) else None
    badge = dmc.Badge(
        str(row["state"]),
        color=_COLOURS.get(str(row["state"]), "gray"),
        variant="dot",  # its text has the colour of all text, which can be read on any page
        className="state",
    )
    if note is None:
        return badge
    return html.Details([html.Summary(badge), html.Div(note, className="note")], className="health")


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else "-"


def _number(value: Any) -> str:
    return "-" if value is None or pd.isna(value) else format_count(value)


def _moment(realtime_ns: Any) -> str:
    if realtime_ns is None or pd.isna(realtime_ns) or not realtime_ns:
        return "-"
    try:
        return datetime.fromtimestamp(int(realtime_ns) / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "-"


def _compare_link(ticked: list[str]) -> str:
    return address.link("/compare", run=ticked) if ticked else "/compare"


def _compare_count(ticked: list[str]) -> str:
    return f"{len(ticked)} ticked" if ticked else "none ticked: compares the newest runs"


def register(app: dash.Dash, runs: Runs) -> None:
    """Ticks are written to the address by the browser alone: drawing the page anew would take the focus from the box."""
    app.clientside_callback(
        ClientsideFunction("runs", "tick"),
        Output(COMPARE, "href"),
        Output(COMPARE_COUNT, "children"),
        Input(TICKED, "value"),
        State(COMPARE, "href"),
    )


PAGE: Final = Page(
    "/", "Runs", "Which runs are there, how do they differ, and are they complete?", render, register
)
