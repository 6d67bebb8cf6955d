"""The page Records: the grid of all records of a run, which the server filters, sorts and counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import dash
import dash_ag_grid as dag
import dash_mantine_components as dmc
import flask
import pandas as pd
from dash import ClientsideFunction, Input, Output, State, dcc, html
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from commprof.analysis import api
from commprof_dash import address
from commprof_dash.address import Query
from commprof_dash.components import cards, messages
from commprof_dash.data import Runs, reason
from commprof_dash.downloads import download
from commprof_dash.pages.index_wait import RUN, builds, waiting_for_index
from commprof_dash.pages.one_run import draw_run, no_records
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.pages.records.data import (
    COLUMN,
    COLUMNS,
    FILTER,
    SHOWN_FIRST,
    SINCE_BEGIN,
    SORT,
    Asked,
    after_first,
    asked_in,
    filter_model,
    filter_texts,
    filters_of,
    is_number,
    sort_text,
)
from commprof_dash.pages.timeline.data import path_of, record_of, record_text
from commprof_dash.pages.timeline.page import PATH as TIMELINE_PATH
from commprof_dash.pages.timeline.record import record_section
from commprof_dash.theme import Scheme

PATH: Final = "/records"
CSV_PATH: Final = "/records.csv"
GRID: Final = "records-grid"
CHOSEN: Final = "records-columns"
COUNTED: Final = "records-counted"
FILE: Final = "records-file"
STATE: Final = "records-state"
WRITTEN: Final = "records-written"
DETAILS: Final = "records-details"  # a drawer with the details of the row that was clicked
_BLOCK: Final = 100  # the number of rows that the grid requests at a time
_LONGEST: Final = 300  # the largest number of characters in a cell
# The widths are in pixels. "parameter_broadcast" and "reduce_scatter" fit, and the columns shown first fit a
# screen of 1440 pixels.
_WIDTHS: Final = {
    **dict.fromkeys(("parameters", "call_site", "module", "sizes"), 200),
    **dict.fromkeys(("op", "intended_op"), 122),
    **dict.fromkeys(("phase", "exposed_ns"), 100),
    "purpose": 167,
    "payload_bytes": 120,
}
_NUMBER_WIDTH: Final = 79
_WIDTH: Final = 106


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """Return the page for the run, filters, order and columns in ``query``."""

    def answers(name: str) -> tuple[list[Component], list[Component]]:
        return [], _answers(runs, name, query)

    return draw_run(runs, query, answers)


def _answers(runs: Runs, name: str, query: Query) -> list[Component]:
    path = path_of(runs, name)
    waiting = builds.wait_for(path)
    if waiting is not None:
        return waiting_for_index(waiting, name)
    records = int(api.index(path)["records"])
    if not records and (nothing := no_records(runs, name)) is not None:
        return [nothing]
    steps = runs.step_numbers(name)
    asked = asked_in(query, steps)
    warm = (
        ""
        if len(steps) < 2 or asked.filters != (after_first(steps),)
        else (" The first step is left out until you clear the filter of the column step.")
    )
    return [
        dmc.Drawer(id=DETAILS, title="Record", position="right", size="lg", padding="md"),
        dcc.Store(id=RUN, data=name),
        dcc.Store(id=STATE, data={"pairs": _pairs(asked), "drawn": True}),
        dcc.Store(id=WRITTEN),
        cards.text_card(
            "records",
            "Records",
            "One row for each operation of each rank; a click or Enter on a row shows all about it. Filters take bytes and "
            f"nanoseconds.{warm}",
            [
                html.Div(
                    [
                        dmc.MultiSelect(
                            id=CHOSEN,
                            label="Columns",
                            data=list(COLUMNS),
                            value=list(asked.columns),
                            searchable=True,
                            hidePickedOptions=True,
                            classNames={"pillsList": "pills"},
                            className="control-wide",
                        ),
                        html.A(
                            "CSV of the filtered records",
                            id=FILE,
                            href=_file(name, asked),
                            className="card-action",
                        ),
                    ],
                    className="controls",
                ),
                html.P(f"{records:,} records", id=COUNTED, className="card-subtitle", role="status"),
                html.Div(_grid(asked), role="group", **{"aria-label": "Records"}),
            ],
        ),
    ]


def _grid(asked: Asked) -> Component:
    return dag.AgGrid(
        id=GRID,
        rowModelType="infinite",
        getRowId="params.data.key",
        columnDefs=column_definitions(asked.columns, asked.sort),
        filterModel=filter_model(asked.filters),
        defaultColDef={
            "sortable": True,
            "resizable": True,
            "floatingFilter": True,
            "suppressMovable": False,
            "minWidth": 76,
            "sortingOrder": ["asc", "desc", None],
        },
        dashGridOptions={
            "cacheBlockSize": _BLOCK,
            "maxBlocksInCache": 20,
            "rowBuffer": 0,
            "infiniteInitialRowCount": 1,
            "ensureDomOrder": True,
            "enableCellTextSelection": True,
            "tooltipShowDelay": 400,
            "suppressMultiSort": True,
        },
        eventListeners={"cellKeyDown": ["recordsKey(params)"]},
        style={"height": "68vh", "minHeight": "360px"},
    )


def column_definitions(shown: tuple[str, ...], sort: str | None) -> list[dict[str, Any]]:
    """Return the columns of the grid: the columns ``shown`` in this order, then the others, which are hidden."""
    order = [*shown, *(name for name in COLUMNS if name not in shown)]
    definitions: list[dict[str, Any]] = [
        {
            "field": "link",
            "headerName": "Timeline",
            "cellRenderer": "markdown",
            "sortable": False,
            "filter": False,
            "width": 88,
        }
    ]
    for name in order:
        column = COLUMNS[name]
        number = is_number(column)
        tooltip = f"{column.doc} ({column.unit})" if column.unit else column.doc
        definitions.append(
            {
                "field": name,
                "headerName": _heading(name),
                "headerTooltip": tooltip + (", since the first record" if name in SINCE_BEGIN else ""),
                "hide": name not in shown,
                "filter": "agNumberColumnFilter" if number else "agTextColumnFilter",
                "filterParams": {"maxNumConditions": 1, "debounceMs": 300, "buttons": ["reset"]},
                "type": "rightAligned" if number else None,
                "width": _WIDTHS.get(name, _NUMBER_WIDTH if number and not column.unit else _WIDTH),
                "initialSort": None if sort is None or sort.lstrip("-") != name else _way(sort),
            }
        )
    return [{key: value for key, value in one.items() if value is not None} for one in definitions]


def _way(sort: str) -> str:
    return "desc" if sort.startswith("-") else "asc"


def _heading(name: str) -> str:
    words = {"begin_ns": "at", "pg": "group", "seq": "number"}.get(name, name.removesuffix("_ns"))
    return words.replace("_", " ")


def rows_of(frame: pd.DataFrame, name: str, begin_ns: int) -> list[dict[str, Any]]:
    """Return rows in the form of the grid, with units and a link to the timeline."""
    shown = {column: _shown(frame[column], COLUMNS[column].unit, begin_ns) for column in frame.columns}
    links = [
        _link(name, begin_ns, *values)
        for values in zip(
            *(frame[column].tolist() for column in ("rank", "attempt", "pid", "seq", "begin_ns", "end_ns")),
            strict=True,
        )
    ]
    keys = map(
        record_text, zip(*(frame[one].tolist() for one in ("rank", "attempt", "pid", "seq")), strict=True)
    )
    columns = [*shown, "link", "key"]
    return [dict(zip(columns, row, strict=True)) for row in zip(*shown.values(), links, keys, strict=True)]


def _shown(values: pd.Series, unit: str, begin_ns: int) -> list[Any]:
    write: Callable[[Any], Any] = {"bytes": api.format_bytes, "ns": api.format_ns}.get(unit, _text)
    if values.name in SINCE_BEGIN:
        return [_precise(value - begin_ns) for value in values]
    return ["" if pd.isna(value) else write(value) for value in values.tolist()]


def _precise(duration: int) -> str:
    """Return a time since the start of the run with all its microseconds.

    Neighboring records differ by few microseconds.
    """
    return f"{duration / 1e9:,.6f} s"


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return value
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _link(name: str, origin: int, rank: int, attempt: int, pid: int, seq: int, begin: int, end: int) -> str:
    room = max(1_000, 10 * (end - begin))
    place = address.link(
        TIMELINE_PATH,
        run=name,
        record=record_text((rank, attempt, pid, seq)),
        **{"from": str(begin - origin - room), "to": str(end - origin + room)},
    )
    return f"[show]({place})"


def _pairs(asked: Asked) -> list[tuple[str, str]]:
    """Return ``asked`` as pairs of an address, without the defaults."""
    columns = () if asked.columns == SHOWN_FIRST else asked.columns
    return [
        *((FILTER, text) for text in asked.filters or ("",)),
        *(((SORT, asked.sort),) if asked.sort else ()),
        *((COLUMN, column) for column in columns),
    ]


def _file(name: str, asked: Asked) -> str:
    query: dict[str, Any] = {FILTER: list(asked.filters)} if asked.filters else {}
    query |= {SORT: asked.sort} if asked.sort else {}
    return address.link(CSV_PATH, run=name, **query, **{COLUMN: list(asked.columns)})


def register(app: dash.Dash, runs: Runs) -> None:
    """Add the callbacks of the grid, and the download of the filtered records."""

    @app.callback(
        Output(GRID, "getRowsResponse"),
        Output(COUNTED, "children"),
        Output(FILE, "href"),
        Output(STATE, "data"),
        Input(GRID, "getRowsRequest"),
        State(CHOSEN, "value"),
        State(RUN, "data"),
    )
    def rows(request: Mapping[str, Any] | None, columns: list[str] | None, name: str) -> tuple[Any, ...]:
        if not request:
            raise PreventUpdate
        asked = Asked(
            filter_texts(request.get("filterModel")),
            sort_text(request.get("sortModel")),
            tuple(columns or SHOWN_FIRST),
        )
        try:
            path = path_of(runs, name)
            facts = api.index(path)
            begin = facts["begin_ns"]
            offset = max(0, int(request["startRow"]))
            limit = min(10 * _BLOCK, max(0, int(request["endRow"]) - offset))
            page = api.records_page(path, filters_of(asked.filters, begin), asked.sort, offset, limit)
        except Exception as error:
            message = f"The run {name!r} no longer exists." if isinstance(error, KeyError) else reason(error)
            return {"rowData": [], "rowCount": 0}, message, dash.no_update, dash.no_update
        answer = {"rowData": rows_of(page.rows, name, begin), "rowCount": page.total}
        return answer, _counted(page.total, facts["records"]), _file(name, asked), {"pairs": _pairs(asked)}

    @app.callback(
        Output(GRID, "columnDefs"),
        Output(FILE, "href", allow_duplicate=True),
        Output(STATE, "data", allow_duplicate=True),
        Input(CHOSEN, "value"),
        State(GRID, "getRowsRequest"),
        State(RUN, "data"),
        prevent_initial_call=True,
    )
    def choose(columns: list[str] | None, request: Mapping[str, Any] | None, name: str) -> tuple[Any, ...]:
        request = request or {}
        chosen = tuple(column for column in columns or SHOWN_FIRST if column in COLUMNS)
        asked = Asked(filter_texts(request.get("filterModel")), sort_text(request.get("sortModel")), chosen)
        return column_definitions(chosen, asked.sort), _file(name, asked), {"pairs": _pairs(asked)}

    @app.callback(
        Output(DETAILS, "children"),
        Output(DETAILS, "opened"),
        Input(GRID, "cellClicked"),
        State(RUN, "data"),
        prevent_initial_call=True,
    )
    def details(clicked: Mapping[str, Any] | None, name: str) -> tuple[Any, ...]:
        key = record_of(str((clicked or {}).get("rowId") or ""))
        if key is None or (clicked or {}).get("colId") == "link":
            raise PreventUpdate
        try:
            path = path_of(runs, name)
            return record_section(path, name, key, int(api.index(path)["begin_ns"])), True
        except Exception as error:
            return messages.broken_page(reason(error)), True

    app.clientside_callback(
        ClientsideFunction("records", "write"),
        Output(WRITTEN, "data"),
        Input(STATE, "data"),
        State(RUN, "data"),
    )

    @app.server.route(CSV_PATH)
    def records_csv() -> flask.Response:
        query = address.parse(flask.request.query_string.decode("utf-8", "replace"))
        asked = asked_in(query)
        try:
            path = path_of(runs, next(iter(query.get(address.RUN, ())), ""))
            filters = filters_of(asked.filters, api.index(path)["begin_ns"])
            # This raises errors of the filters before the download begins.
            api.records_page(path, filters, asked.sort, limit=0)
            return download("commprof-records.csv", api.records_csv(path, filters, asked.sort, asked.columns))
        except KeyError:
            return flask.Response("There is no such run.\n", 404, mimetype="text/plain")
        except Exception as error:
            return flask.Response(reason(error) + "\n", 422, mimetype="text/plain")


def _counted(fit: int, records: int) -> str:
    if fit == records:
        return f"{records:,} records"
    return (
        f"{fit:,} of {records:,} records fit" if fit else f"None of {records:,} records fits; clear a filter"
    )


PAGE: Final = Page(
    PATH,
    "Records",
    "What does each record of a run contain?",
    order=110,
    render=render,
    register=register,
    has_grid=True,
    has_charts=False,
)
