"""Tables: the same numbers as a figure, as text and as a CSV file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

import dash_mantine_components as dmc
import pandas as pd
from dash import html
from dash.development.base_component import Component

from commprof.analysis import api

Cell: TypeAlias = str | Component


class Field(NamedTuple):
    """One column of a table on the page: its heading, and how a value is written."""

    column: str
    heading: str
    format: Callable[[Any], Cell] = str
    numeric: bool = False


def table(frame: pd.DataFrame, fields: Sequence[Field], caption: str) -> Component:
    """``frame`` as a table that scrolls sideways by itself where the page is narrow."""
    rows = [
        [_cell(field, value) for field, value in zip(fields, row, strict=True)]
        for row in _values(frame, fields)
    ]
    head = html.Tr([html.Th(field.heading, scope="col", className=_alignment(field)) for field in fields])
    alignments = [_alignment(field) for field in fields]
    body = [
        html.Tr([html.Td(cell, className=side) for side, cell in zip(alignments, row, strict=True)])
        for row in rows
    ]
    return html.Div(
        dmc.Table(
            [html.Caption(caption, className="visually-hidden"), html.Thead(head), html.Tbody(body)],
            highlightOnHover=True,
            tabularNums=True,
            verticalSpacing=6,
            className="data-table",
        ),
        className="table-scroll",
        tabIndex=0,
        role="group",  # not a region: the section around it has the same name
        **{"aria-label": caption},
    )


def csv_link(name: str, frame: pd.DataFrame) -> html.A:
    """A link that downloads ``frame`` as it stands, with every digit; it works without the server."""
    return html.A(
        "CSV",
        href="data:text/csv;charset=utf-8," + quote(api.frame_csv(frame)),
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
        return html.Span("-", **{"aria-label": "none"})
    return field.format(value)


def _alignment(field: Field) -> str:
    return "number" if field.numeric else "text"
