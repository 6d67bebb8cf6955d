"""Tables of a figure's numbers, as text and as a CSV file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import dash_mantine_components as dmc
import pandas as pd
from dash import html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash import ids

Cell: TypeAlias = str | Component
_ALIGNED_COLUMNS: Final = 24  # as many as app.css has classes number-K for
_LOOK: Final = {"highlightOnHover": True, "tabularNums": True, "verticalSpacing": 6}
_MANY_COLUMNS: Final = 9
_NARROW: Final = 6  # pixels beside each cell, so that a table of many columns fits a page of usual width


class Field(NamedTuple):
    """One column of a table on the page: its heading, and how a value is written."""

    column: str
    heading: str
    format: Callable[[Any], Cell] = str
    numeric: bool = False


class Order(NamedTuple):
    """The column that a table is sorted by, and the direction; no column: as given."""

    column: str | None
    descending: bool = False


def table(
    frame: pd.DataFrame, fields: Sequence[Field], caption: str, order: Order | None = None
) -> Component:
    """``frame`` as a table that scrolls sideways by itself where the page is narrow.

    ``order``: how the rows are sorted already; the headings are then buttons that sort by their column.
    """
    rows = [
        [_cell(field, value) for field, value in zip(fields, row, strict=True)]
        for row in _values(frame, fields)
    ]
    look = _LOOK | ({"horizontalSpacing": _NARROW} if len(fields) > _MANY_COLUMNS else {})
    numeric = [number for number, field in enumerate(fields, 1) if field.numeric]
    # Each Dash component costs the browser much more than what it draws, and more the more there are: a table of
    # text alone is one component.
    if (
        all(isinstance(cell, str) for row in rows for cell in row)
        and max(numeric, default=0) <= _ALIGNED_COLUMNS
        and order is None
    ):
        drawn = dmc.Table(
            data={"caption": caption, "head": [field.heading for field in fields], "body": rows},
            className=" ".join(["data-table", *(f"number-{number}" for number in numeric)]),
            **look,
        )
    else:
        sides = ["number" if field.numeric else "text" for field in fields]
        heads = [
            html.Th(field.heading, scope="col", className=side)
            if order is None
            else _sorting_head(field, side, order)
            for field, side in zip(fields, sides, strict=True)
        ]
        blanks = [
            html.Td(className=side, **{"data-label": field.heading})
            for field, side in zip(fields, sides, strict=True)
        ]
        body = [
            html.Tr([filled(blank, children=cell) for blank, cell in zip(blanks, row, strict=True)])
            for row in rows
        ]
        children = [html.Caption(caption), html.Thead(html.Tr(heads)), html.Tbody(body)]
        # On a telephone each row of a sorted table is a block, its values below each other.
        drawn = dmc.Table(children, className="data-table" + (" in-blocks" if order else ""), **look)
    return html.Div(
        drawn,
        className="table-scroll",
        tabIndex=0,
        role="group",  # not a region: the section around it has the same name
        **{"aria-label": caption},
    )


def filled(blank: Component, **properties: Any) -> Component:
    """``blank`` with these properties too. Of thousands, Dash's constructor takes ten times as long.

    Neither does each of them look for its 60 unset properties when it is written as JSON.
    """
    copy = blank.__class__.__new__(blank.__class__)
    names = [name for name in blank._prop_names if name in blank.__dict__ and name not in properties]
    copy.__dict__ = {**blank.__dict__, **properties, "_prop_names": [*properties, *names]}
    return copy


def _sorting_head(field: Field, side: str, order: Order) -> Component:
    direction = (
        ("descending" if order.descending else "ascending") if field.column == order.column else "none"
    )
    return html.Th(
        html.Button(field.heading, id=ids.sorting(field.column), className="sort", n_clicks=0),
        scope="col",
        className=side,
        **{"aria-sort": direction},
    )


def rows_text(rows: int) -> str:
    """``1 row``, ``1,234 rows``."""
    return f"{rows:,} row{'' if rows == 1 else 's'}"


def csv_link(name: str, frame: pd.DataFrame) -> html.A:
    """A link that downloads ``frame`` as it stands, with every digit; it works without the server."""
    content = b64encode(api.frame_csv(frame).encode()).decode()  # percent signs take 100 times as long
    return html.A(
        "CSV",
        href="data:text/csv;charset=utf-8;base64," + content,
        download=f"commprof-{name}.csv",
        className="card-action",
        title="Download the numbers of this card as CSV",
        **{"aria-label": f"Download {name} as CSV"},
    )


def facts(values: Mapping[str, Cell]) -> Component:
    """Names and values, one pair a line, in two columns where there is room."""
    return html.Dl(
        [html.Div([html.Dt(name), html.Dd(value)], className="fact") for name, value in values.items()],
        className="facts",
    )


def _values(frame: pd.DataFrame, fields: Sequence[Field]) -> list[tuple[Any, ...]]:
    return list(zip(*(frame[field.column].tolist() for field in fields), strict=True))


def _cell(field: Field, value: Any) -> Cell:
    # Of one value this tells what pd.isna does, in a small part of the time.
    if value is None or value is pd.NA or value != value:
        return "-"
    return field.format(value)
