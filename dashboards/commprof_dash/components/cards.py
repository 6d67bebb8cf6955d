"""Builds cards: a figure with its text, table and CSV file; a table; a single number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dash_mantine_components as dmc
import pandas as pd
import plotly.graph_objects as go
from dash import dcc, html
from dash.development.base_component import Component

from commprof_dash import ids
from commprof_dash.components.folds import fold
from commprof_dash.components.graph import graph
from commprof_dash.components.legend import legend
from commprof_dash.components.tables import Cell, Field, csv_link, rows_text, table


def figure_card(
    name: str,
    title: str,
    subtitle: str,
    figure: go.Figure,
    frame: pd.DataFrame,
    fields: Sequence[Field],
    most_rows: int | None = None,
    how: Component | None = None,
) -> Component:
    """Return a card with a figure, and below it the numbers that the figure shows.

    Args:
        name: The name of the card within the page and in file names.
        subtitle: The text that describes the figure. It names the byte measure if there is one.
        frame: The data of the figure. The CSV file contains all of it, and the table contains the ``fields``.
        most_rows: The largest number of rows in the table, which shows the first rows; None shows all rows.
        how: The result of :func:`how_to_read`, which is placed below the figure.
    """
    shown = frame if most_rows is None else frame.head(most_rows)
    rows = rows_text(len(frame))
    if len(shown) < len(frame):
        rows = f"the first {len(shown):,} of {rows}; the CSV file has all"
    return body_card(
        name,
        title,
        subtitle,
        [
            legend(figure),
            graph(name, figure, f"{title}. {subtitle} The table below has the same numbers."),
            html.Div(
                [
                    fold(f"Table ({rows})", [table(shown, fields, title)]),
                    how,
                ],
                className="card-folds",
            ),
        ],
        frame,
    )


def how_to_read(text: str) -> Component:
    """Return an explanation at the end of a card, which is collapsed to one line."""
    return html.Details(
        [
            html.Summary("How to read this"),
            html.P(
                [f"{text} The ", glossary_link("glossary"), " defines the terms."], className="card-subtitle"
            ),
        ],
        className="card-table",
    )


def glossary_link(text: str, **looks: str) -> Component:
    """Return a link that opens the glossary of the pages in a new window.

    docs/generate.py makes this glossary from docs/glossary.md.
    """
    return html.A(text, href="assets/glossary.html", target="_blank", **looks)


def table_card(
    name: str,
    title: str,
    subtitle: str,
    frame: pd.DataFrame,
    fields: Sequence[Field],
    most_rows: int | None = None,
    download: pd.DataFrame | None = None,
) -> Component:
    """Return a card with a table but no figure. ``most_rows`` has the same meaning as in :func:`figure_card`.

    The CSV file contains ``download``, or ``frame`` if ``download`` is None.
    """
    shown = frame if most_rows is None else frame.head(most_rows)
    if len(shown) < len(frame):
        subtitle += f" The first {len(shown):,} of {len(frame):,} rows; the CSV file has all."
    return body_card(
        name, title, subtitle, [table(shown, fields, title)], frame if download is None else download
    )


def empty_card(name: str, title: str, message: str) -> Component:
    """Return a card that shows no data, but the reason why."""
    return body_card(name, title, "", [dmc.Text(message, className="muted", size="sm")], None)


def text_card(name: str, title: str, subtitle: str, children: Sequence[Component]) -> Component:
    """Return a card with any content."""
    return body_card(name, title, subtitle, children, None)


def tile(name: str, value: Cell, note: str = "") -> Component:
    """Return a tile with one large number, its name above and a note below."""
    return dmc.Paper(
        [
            html.Div(name, className="tile-name"),
            html.Div(value, className="tile-value"),
            html.Div(note, className="tile-note"),
        ],
        className="tile",
        withBorder=True,
    )


def tiles(children: Sequence[Component]) -> Component:
    """Return the tiles in as many columns as fit."""
    return html.Div(children, className="tiles")


def columns(children: Sequence[Component]) -> Component:
    """Return the cards in two columns if the page is wide enough, else in one."""
    return html.Div(children, className="columns")


def body_card(
    name: str, title: str, subtitle: str, body: Sequence[Component | None], frame: pd.DataFrame | None
) -> Component:
    """Return a card with ``body`` below its title.

    Its CSV file contains ``frame``; None for a card without a CSV file.
    """
    heading = ids.card(name) + "-title"
    return dmc.Paper(
        html.Section(
            [
                html.Div(
                    [
                        html.H2(title, id=heading),
                        html.Div(
                            [
                                *(image_buttons(name) if _has_graph(body) else ()),
                                csv_link(name, frame) if frame is not None and len(frame) else None,
                            ],
                            className="card-actions",
                        ),
                    ],
                    className="card-head",
                ),
                html.P(subtitle, className="card-subtitle") if subtitle else None,
                *body,
            ],
            **{"aria-labelledby": heading},
        ),
        id=ids.card(name),
        className="card",
        withBorder=True,
    )


def image_buttons(name: str) -> list[Component]:
    """Return the buttons that download the charts of the card ``name``.

    The browser makes the file (assets/callbacks.js).
    """
    return [
        html.Button(
            form.upper(),
            className="card-image",
            type="button",
            title=f"Download the chart as {form.upper()}",
            **{"data-image": form, "data-name": name, "aria-label": f"Download {name} as {form.upper()}"},
        )
        for form in ("png", "svg")
    ]


def _has_graph(body: Sequence[Component | None]) -> bool:
    parts: list[Any] = list(body)
    while parts:
        part = parts.pop()
        if isinstance(part, dcc.Graph):
            return True
        if not isinstance(part, dmc.Table):  # a table can have thousands of cells and contains no graph
            below = getattr(part, "children", None)
            parts += below if isinstance(below, list | tuple) else [below] if below is not None else []
    return False
