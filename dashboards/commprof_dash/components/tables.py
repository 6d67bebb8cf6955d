"""Builds tables of a figure's numbers, as text and as a CSV file."""

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
_ALIGNED_COLUMNS: Final = 24  # the number of classes number-K in app.css
_LOOK: Final = {"highlightOnHover": True, "tabularNums": True, "verticalSpacing": 6}
_MANY_COLUMNS: Final = 9
# Pixels beside each cell, so that a table with many columns fits a page of the usual width.
_NARROW: Final = 6


class Field(NamedTuple):
    """One column of a table on the page: its heading, and the function that formats its values."""

    column: str
    heading: str
    format: Callable[[Any], Cell] = str
    numeric: bool = False


class Order(NamedTuple):
    """The column that a table is sorted by, and the direction. Without a column, the rows keep their order."""

    column: str | None
    descending: bool = False


def table(
    frame: pd.DataFrame, fields: Sequence[Field], caption: str, order: Order | None = None
) -> Component:
    """Return ``frame`` as a table that scrolls sideways on narrow pages.

    Args:
        order: The order that the rows are already sorted in. The headings are then buttons that sort by their
            column. None: The headings are text.
    """
    rows = [
        [_cell(field, value) for field, value in zip(fields, row, strict=True)]
        for row in _values(frame, fields)
    ]
    look = _LOOK | ({"horizontalSpacing": _NARROW} if len(fields) > _MANY_COLUMNS else {})
    numeric = [number for number, field in enumerate(fields, 1) if field.numeric]
    # Each Dash component costs the browser much more time than the text that it contains, and this cost grows
    # with the number of components. Therefore, a table that contains only text is a single component.
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
        # On a phone, each row of a sorted table is a block with its values below each other.
        drawn = dmc.Table(children, className="data-table" + (" in-blocks" if order else ""), **look)
    return html.Div(
        drawn,
        className="table-scroll",
        tabIndex=0,
        role="group",  # not a region, because the section around the table has the same name
        **{"aria-label": caption},
    )


def filled(blank: Component, **properties: Any) -> Component:
    """Return a copy of ``blank`` with these additional properties.

    For thousands of components, Dash's constructor takes ten times as long. The copies also do not search for
    their 60 unset properties when they are written as JSON.
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
    """Return the number of rows as text: ``1 row``, ``1,234 rows``."""
    return f"{rows:,} row{'' if rows == 1 else 's'}"


def csv_link(name: str, frame: pd.DataFrame) -> html.A:
    """Return a link that downloads ``frame`` with all digits. The link works without the server."""
    content = b64encode(api.frame_csv(frame).encode()).decode()  # percent-encoding takes 100 times as long
    return html.A(
        "CSV",
        href="data:text/csv;charset=utf-8;base64," + content,
        download=f"commprof-{name}.csv",
        className="card-action",
        title="Download the numbers of this card as CSV",
        **{"aria-label": f"Download {name} as CSV"},
    )


def facts(values: Mapping[str, Cell]) -> Component:
    """Return names and values, one pair per line, in two columns if the page is wide enough."""
    return html.Dl(
        [html.Div([html.Dt(name), html.Dd(value)], className="fact") for name, value in values.items()],
        className="facts",
    )


def _values(frame: pd.DataFrame, fields: Sequence[Field]) -> list[tuple[Any, ...]]:
    return list(zip(*(frame[field.column].tolist() for field in fields), strict=True))


def _cell(field: Field, value: Any) -> Cell:
    # For a single value, this returns the same as pd.isna in a small part of the time.
    if value is None or value is pd.NA or value != value:
        return "-"
    return field.format(value)
