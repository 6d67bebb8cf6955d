"""Folds: what is behind a line, and drawn by the browser when the line is clicked first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Final

import dash_mantine_components as dmc
from dash import html
from dash.development.base_component import Component

_numbers: Final = count()


def fold(title: str, children: Sequence[Component | None], is_open: bool = False) -> Component:
    """``children``, part of a card, behind a line. They cost the browser nothing until it is opened."""
    return _details(title, children, is_open, className="card-table")


def fold_of_cards(title: str, children: Sequence[Component], is_open: bool = False) -> Component:
    """The same of cards, which are seldom looked at."""
    return _details(title, [html.Div(children, className="fold-body")], is_open, className="fold")


def _details(title: str, children: Sequence[Component | None], is_open: bool, **looks: str) -> Component:
    # The browser finds what it has to draw by the number: callbacks.js listens to each fold that opens.
    number = next(_numbers)
    body = dmc.Collapse(
        list(children), id=fold_id(number), opened=is_open, keepMounted=False, transitionDuration=0
    )
    attributes: dict[str, Any] = {"data-fold": str(number), **looks}
    return html.Details([html.Summary(title), body], open=is_open, **attributes)


def fold_id(number: int) -> dict[str, Any]:
    """Id of what is behind the line of a fold."""
    return {"type": "fold", "number": number}
