"""The page Runs: all runs below the directory in one table, where a sweep is one row that can be expanded.

Ticked runs can be opened on the page Compare.
"""

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
FILL: Final = "runs-fill"  # an interval that is enabled while facts of runs are missing
FILL_NOW: Final = "runs-fill-now"  # a store: the ticks of FILL, without those during an answer
COLUMNS: Final = "runs-columns"  # a button
COLUMNS_NOW: Final = "runs-columns-now"
MISSING: Final = "runs-missing"  # a store: the runs whose facts are missing
FOLLOW: Final = "runs-follow"
FOLLOW_NOW: Final = "runs-follow-now"
STAMP: Final = "runs-stamp"
WRITTEN: Final = "runs-written"
FIND: Final = "find"  # the search text, in the address
ORDER: Final = "order"  # the column to sort by, in the address; -COLUMN for descending order
# The columns in the address: all. The browser reads expanded sweeps and filters from the address.
SHOWN: Final = "columns"
ALL: Final = "all"

_FILL_MS: Final = 300
_FILL_SECONDS: Final = 0.5
_FOLLOW_MS: Final = 3000
_MOST_HEIGHT: Final = 36  # the largest height of the table in rows
_ROW_PIXELS: Final = 34
_KNOWN: Final = KnownFacts()

# Each entry is a field, heading, width and tooltip. Numbers are sorted and filtered in the unit of the
# tooltip.
_TEXTS: Final = (
    (
        "state",
        "State",
        92,
        "running, complete, failed, killed or unreadable; hover over a state for the reason",
    ),
    ("setting", "Setting", 190, "the point of the sweep, or the ZeRO keys of the config"),
)
_NUMBERS: Final = (
    ("step_time", "Step time", 112, "median time of a training step, without the first; filter in ms"),
    ("exposed", "Exposed", 100, "exposed communication as a share of the step; filter in %"),
    (
        "sent",
        "Bytes per step",
        118,
        "wire bytes (modelled) that a rank sends per training step; filter in MiB",
    ),
)
_MORE_NUMBERS: Final = (
    ("ranks", "Ranks", 76, "ranks of the job"),
    ("steps", "Steps", 76, "training steps that were recorded"),
    ("records", "Records", 92, "one for each operation of each rank"),
)
_LOST: Final = (
    ("dropped", "Dropped", 84, "records that did not fit"),
    ("unseen", "Unseen", 84, "collectives that a group counted and no record shows"),
)
_DURATION: Final = ("duration", "Duration", 106, "from the start of the run to its end; filter in s")
_WRAPPED: Final = ("state", "setting", "verdict", "step_time", "exposed", "sent", "duration")
_WRAPPING: Final = {
    "wrapText": True,
    "autoHeight": True,
    "cellStyle": {"lineHeight": "1.35", "paddingBlock": "7px"},
}
_GROWING: Final = {"name": 3, "setting": 4}  # the columns that share the remaining width, in this ratio
_VERDICT_WORDS: Final = (
    "Verdict of commprof verify: closed, every byte is explained; mismatch, two levels contradict each other or bytes have "
    "no explanation; cannot tell, no mismatch was found, but a part of the run is not known."
)


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """Return the page with all runs, the newest first, in the state that the address names."""
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
        dcc.Store(id=COLUMNS_NOW),
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
                    html.Button(
                        "Fewer columns" if _has_all(query) else "All columns",
                        id=COLUMNS,
                        type="button",
                        className="tool",
                        n_clicks=0,
                    ),
                ],
                className="row-actions",
            ),
            html.Div(_grid(rows, query, ticked), role="group", **{"aria-label": "Runs"}),
            html.P(_VERDICT_WORDS, className="card-subtitle legend-line"),
        ],
        listing,
    )


def _has_all(query: Query) -> bool:
    return next(iter(query.get(SHOWN, ())), "") == ALL


def _grid(rows: Sequence[dict[str, Any]], query: Query, ticked: list[str]) -> Component:
    shown = sum(1 for row in rows if row["sweep"] is None)
    return dag.AgGrid(
        id=GRID,
        rowData=list(rows),
        getRowId="params.data.id",
        columnDefs=_columns(next(iter(query.get(ORDER, ())), ""), _has_all(query), rows),
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
                "width": 48,
                "headerTooltip": "Ticked runs are compared",
                "resizable": False,
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


def _columns(order: str, has_all: bool, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the columns of ``rows``. ``order`` is in the form of the address.

    Without ``has_all``, return only the columns that fit a window of 1440 pixels. The columns of dropped and
    unseen collectives are added if they have values.
    """
    columns: list[dict[str, Any]] = [
        {
            "field": "name",
            "headerName": "Run",
            "headerTooltip": "A run, or a sweep (expandable)",
            "cellRenderer": "RunName",
            "filter": "agTextColumnFilter",
            "tooltipField": "name",
            "minWidth": 150,
            "flex": _GROWING["name"],
            **_WRAPPING,
        }
    ]
    columns += [_column(*text, text=True) for text in _TEXTS]
    columns[-1]["cellRenderer"] = "RunSetting"
    columns += [_column(*number) for number in _NUMBERS]
    columns.append(
        _column("verdict", "Verdict", 92, "of commprof verify: do requested and issued agree?", text=True)
    )
    lost = [_column(*number) for number in _LOST if has_all or any(row[number[0]] for row in rows)]
    columns += [*lost, _column(*_DURATION)]
    columns.append(
        _column("started", "Started", 112, "local time; hover for the seconds")
        | {
            "filter": False,
            "floatingFilter": False,
            "tooltipValueGetter": {"function": "params.data.started_whole"},
        }
    )
    more = [_column(*number) for number in _MORE_NUMBERS]
    more.append(_column("script", "What ran", 120, "the training script", text=True))
    columns += more if has_all else [column | {"hide": True} for column in more]
    for column in columns:
        if column["field"] == order.lstrip("-"):
            column["initialSort"] = "desc" if order.startswith("-") else "asc"
    return columns


def _column(field: str, heading: str, width: int, about: str, text: bool = False) -> dict[str, Any]:
    shared: dict[str, Any] = {"field": field, "headerName": heading, "headerTooltip": about, "width": width}
    if field in _WRAPPED:
        # The last keys of a sweep's settings distinguish its runs, and the row of a sweep has ranges, so
        # neither is truncated.
        shared |= _WRAPPING
    if field in _GROWING:
        shared |= {"flex": _GROWING[field], "minWidth": shared.pop("width")}
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
    """Return the address of the page Compare for the ticked runs."""
    return address.link("/compare", run=ticked) if ticked else "/compare"


def compare_count(ticked: list[str]) -> str:
    """Return the text that states how many runs are ticked."""
    return f"{len(ticked)} ticked" if ticked else "none ticked: compares the newest sweep or program"


def register(app: dash.Dash, runs: Runs) -> None:
    """Add the callbacks that fill and update the table.

    The browser sorts, filters and expands rows, and writes the address.
    """

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
        # The table is shown at once, and some runs are read at each tick, because a directory may have
        # hundreds of runs.
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

    # The browser drops ticks during an answer, because it would discard their result.
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
    app.clientside_callback(
        ClientsideFunction("runs", "columns"),
        Output(COLUMNS_NOW, "data"),
        Input(COLUMNS, "n_clicks"),
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
    has_grid=True,
    has_charts=False,
)
