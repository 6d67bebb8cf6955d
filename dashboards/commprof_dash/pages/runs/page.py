"""Runs: all runs below the directory in one table, a sweep in one row that opens. Ticked runs go to Compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import dash
import dash_ag_grid as dag
import pandas as pd
from dash import ClientsideFunction, Input, Output, State, dcc, html
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from commprof_dash import address
from commprof_dash.address import Query
from commprof_dash.components import cards, messages
from commprof_dash.data import Runs
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.pages.runs.data import KnownFacts, read_some, table_rows
from commprof_dash.theme import Scheme

if TYPE_CHECKING:
    from collections.abc import Sequence

GRID: Final = "runs-grid"
SEARCH: Final = "runs-search"
COMPARE: Final = "runs-compare"
COMPARE_COUNT: Final = "runs-compare-count"
STATES: Final = "runs-states"
FILL: Final = "runs-fill"  # an interval, enabled while facts of runs are missing,
FILL_NOW: Final = "runs-fill-now"  # and a store: its ticks without those during an answer
MISSING: Final = "runs-missing"  # a store: the runs whose facts are missing
FOLLOW: Final = "runs-follow"
FOLLOW_NOW: Final = "runs-follow-now"
STAMP: Final = "runs-stamp"
WRITTEN: Final = "runs-written"
FIND: Final = "find"  # in the address: the text that is searched,
ORDER: Final = (
    "order"  # the column to sort by, -COLUMN for the largest first; the browser reads open sweeps and filters
)

_FILL_MS: Final = 300
_FILL_SECONDS: Final = 0.5
_FOLLOW_MS: Final = 3000
_MOST_HEIGHT: Final = 36  # rows that a page is high at most
_ROW_PIXELS: Final = 34
_KNOWN: Final = KnownFacts()

# field, heading, width, tooltip; numbers are sorted and filtered in the unit of the tooltip.
_TEXTS: Final = (
    (
        "state",
        "State",
        112,
        "running, complete, failed, killed or unreadable; hover over a state for the reason",
    ),
    ("setting", "Setting", 300, "the point of the sweep, or the ZeRO keys of the config"),
)
_NUMBERS: Final = (
    ("step_time", "Step time", 110, "mean time of a training step, without the first; filter in ms"),
    ("exposed", "Exposed", 104, "exposed communication as a share of the step; filter in %"),
    (
        "sent",
        "Bytes per step",
        126,
        "wire bytes (modelled) that a rank sends per training step; filter in MiB",
    ),
)
_MORE_NUMBERS: Final = (
    ("duration", "Duration", 104, "from the start of the run to its end; filter in s"),
    ("ranks", "Ranks", 84, "ranks of the job"),
    ("steps", "Steps", 84, "training steps that were recorded"),
    ("records", "Records", 104, "one for each operation of each rank"),
    ("dropped", "Dropped", 96, "records that did not fit"),
    ("unseen", "Unseen", 96, "collectives that a group counted and no record shows"),
)


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """All runs, the newest first, in the state that the address names."""
    listing = runs.listing()
    if listing.empty:
        return Drawing([], [messages.no_runs(str(runs.directory))], follows=True)
    rows = table_rows(listing, _KNOWN)
    return Drawing([], [_card(listing, rows, query, str(runs.directory)), *_stores(runs, rows)])


def _stores(runs: Runs, rows: Sequence[dict[str, Any]]) -> list[Component]:
    missing = _without_facts(rows)
    return [
        dcc.Store(id=MISSING, data=missing),
        dcc.Store(id=STAMP, data=runs.stamp()),
        dcc.Store(id=WRITTEN),
        dcc.Store(id=FILL_NOW),
        dcc.Store(id=FOLLOW_NOW),
        dcc.Interval(id=FILL, interval=_FILL_MS, disabled=not missing),
        dcc.Interval(id=FOLLOW, interval=_FOLLOW_MS),
    ]


def _without_facts(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows if row["members"] is None and row["verdict"] == "..."]


def _states_text(listing: pd.DataFrame, unread: int) -> str:
    states = listing["state"].value_counts()
    dropped = int(listing["lost"].fillna(0).sum())
    text = f"{len(listing):,} run{'' if len(listing) == 1 else 's'}: "
    text += ", ".join(f"{count:,} {state}" for state, count in states.items())
    text += (f"; {dropped:,} records dropped" if dropped else "") + "."
    return text + (f" Reading the records of {unread:,} ..." if unread else "")


def _card(listing: pd.DataFrame, rows: Sequence[dict[str, Any]], query: Query, directory: str) -> Component:
    names = set(listing["name"])
    ticked = [name for name in query.get(address.TICK, ()) if name in names]
    find = next(iter(query.get(FIND, ())), "")[:200]
    return cards.body_card(
        "runs",
        "All runs",
        "",
        [
            html.Div(
                [
                    dcc.Link("Compare", id=COMPARE, href=compare_link(ticked), className="button"),
                    html.Span(compare_count(ticked), id=COMPARE_COUNT, role="status", className="muted"),
                    html.Label(
                        [
                            html.Span("Search", className="visually-hidden"),
                            dcc.Input(
                                id=SEARCH,
                                type="search",
                                value=find,
                                placeholder="Search name, setting, state ...",
                                className="tool-input runs-search",
                            ),
                        ]
                    ),
                    html.Span(
                        _states_text(listing, len(_without_facts(rows))),
                        id=STATES,
                        role="status",
                        className="muted",
                    ),
                ],
                className="row-actions",
            ),
            html.Div(_grid(rows, query, ticked), role="group", **{"aria-label": "Runs"}),
        ],
        listing,
    )


def _grid(rows: Sequence[dict[str, Any]], query: Query, ticked: list[str]) -> Component:
    shown = sum(1 for row in rows if row["sweep"] is None)
    return dag.AgGrid(
        id=GRID,
        rowData=list(rows),
        getRowId="params.data.id",
        columnDefs=_columns(next(iter(query.get(ORDER, ())), "")),
        selectedRows={"ids": [f"run:{name}" for name in ticked]},
        defaultColDef={
            "sortable": True,
            "resizable": True,
            "floatingFilter": True,
            "minWidth": 76,
            "sortingOrder": ["asc", "desc", None],
        },
        dashGridOptions={
            "rowHeight": _ROW_PIXELS,
            "cacheQuickFilter": False,
            "rowSelection": {
                "mode": "multiRow",
                "checkboxes": {"function": "runsCheckbox(params)"},
                "isRowSelectable": {"function": "runsSelectable(params)"},
                "headerCheckbox": False,
                "enableClickSelection": False,
            },
            "selectionColumnDef": {
                "headerName": "Tick",
                "width": 76,
                "headerTooltip": "Ticked runs are compared",
            },
            "isExternalFilterPresent": {"function": "true"},
            "doesExternalFilterPass": {"function": "runsShown(params)"},
            "postSortRows": {"function": "runsSorted(params)"},
            "ensureDomOrder": True,
            "enableCellTextSelection": True,
            "tooltipShowDelay": 300,
            "suppressMultiSort": True,
            "suppressColumnVirtualisation": True,
        },
        eventListeners={
            "cellKeyDown": ["runsKey(params, setEventData)"],
            "filterChanged": ["runsWrite(params, setEventData)"],
            "sortChanged": ["runsWrite(params, setEventData)"],
        },
        style={"height": f"{min(_MOST_HEIGHT, max(10, shown)) * _ROW_PIXELS + 134}px", "maxHeight": "78vh"},
        dangerously_allow_code=True,
    )


def _columns(order: str) -> list[dict[str, Any]]:
    """The columns; ``order`` as in the address."""
    columns: list[dict[str, Any]] = [
        {
            "field": "name",
            "headerName": "Run",
            "headerTooltip": "A run, or a sweep that opens",
            "cellRenderer": "RunName",
            "filter": "agTextColumnFilter",
            "tooltipField": "name",
            "width": 220,
        }
    ]
    columns += [_column(*text, text=True) for text in _TEXTS]
    columns += [_column(*number) for number in _NUMBERS]
    columns.append(
        _column("verdict", "Verdict", 104, "of commprof verify: do requested and issued agree?", text=True)
    )
    columns += [_column(*number) for number in _MORE_NUMBERS[:3]]
    columns.append(
        _column("started", "Started", 160, "local time") | {"filter": False, "floatingFilter": False}
    )
    columns.append(_column("script", "What ran", 120, "the training script", text=True))
    columns += [_column(*number) for number in _MORE_NUMBERS[3:]]
    for column in columns:
        if column["field"] == order.lstrip("-"):
            column["initialSort"] = "desc" if order.startswith("-") else "asc"
    return columns


def _column(field: str, heading: str, width: int, about: str, text: bool = False) -> dict[str, Any]:
    shared: dict[str, Any] = {"field": field, "headerName": heading, "headerTooltip": about, "width": width}
    if field == "setting":
        # The last keys of a sweep's settings tell them apart, so none is cut.
        shared |= {
            "wrapText": True,
            "autoHeight": True,
            "cellStyle": {"lineHeight": "1.35", "padding": "7px 16px"},
        }
    if text:
        shared["filter"] = "agTextColumnFilter"
        shared["tooltipValueGetter"] = {"function": f"params.data.note || params.data.{field}"}
        return shared
    return shared | {
        "filter": "agNumberColumnFilter",
        "filterParams": {"maxNumConditions": 1},
        "type": "rightAligned",
        "valueFormatter": {"function": f"params.data.{field}_text"},
        "getQuickFilterText": {"function": f"params.data.{field}_text"},
    }


def compare_link(ticked: list[str]) -> str:
    """The address of Compare for the ticked runs."""
    return address.link("/compare", run=ticked) if ticked else "/compare"


def compare_count(ticked: list[str]) -> str:
    """How many runs are ticked."""
    return f"{len(ticked)} ticked" if ticked else "none ticked: compares the newest runs"


def register(app: dash.Dash, runs: Runs) -> None:
    """The callbacks that fill and follow the table. The browser sorts, filters, opens and writes the address."""

    @app.callback(
        Output(GRID, "rowData"),
        Output(MISSING, "data"),
        Output(FILL, "disabled"),
        Output(STATES, "children"),
        Input(FILL_NOW, "data"),
        State(MISSING, "data"),
        prevent_initial_call=True,
    )
    def fill(_: Any, missing: list[str]) -> tuple[Any, ...]:
        done, waiting = read_some(runs, _KNOWN, missing, _FILL_SECONDS)
        if not done:
            raise PreventUpdate
        listing = runs.listing()
        return table_rows(listing, _KNOWN), waiting, not waiting, _states_text(listing, len(waiting))

    @app.callback(
        Output(GRID, "rowData", allow_duplicate=True),
        Output(MISSING, "data", allow_duplicate=True),
        Output(FILL, "disabled", allow_duplicate=True),
        Output(STATES, "children", allow_duplicate=True),
        Output(STAMP, "data"),
        Input(FOLLOW_NOW, "data"),
        State(STAMP, "data"),
        prevent_initial_call=True,
    )
    def follow(_: Any, stamp: str) -> tuple[Any, ...]:
        now = runs.stamp()
        if now == stamp:
            raise PreventUpdate
        listing = runs.listing()
        rows = table_rows(listing, _KNOWN)
        missing = _without_facts(rows)
        return rows, missing, not missing, _states_text(listing, len(missing)), now

    for interval, paced in ((FILL, FILL_NOW), (FOLLOW, FOLLOW_NOW)):
        app.clientside_callback(
            ClientsideFunction("shell", "follow"),
            Output(paced, "data"),
            Input(interval, "n_intervals"),
            prevent_initial_call=True,
        )
    app.clientside_callback(
        ClientsideFunction("runs", "tick"),
        Output(COMPARE, "href"),
        Output(COMPARE_COUNT, "children"),
        Input(GRID, "selectedRows"),
        prevent_initial_call=True,
    )
    app.clientside_callback(ClientsideFunction("runs", "ready"), Output(GRID, "className"), Input(GRID, "id"))
    app.clientside_callback(
        ClientsideFunction("runs", "search"),
        Output(WRITTEN, "data"),
        Input(SEARCH, "value"),
        State(GRID, "id"),
        prevent_initial_call=True,
    )


PAGE: Final = Page(
    "/",
    "Runs",
    "Which runs are there, how do they differ, and are they complete?",
    order=10,
    render=render,
    register=register,
)
