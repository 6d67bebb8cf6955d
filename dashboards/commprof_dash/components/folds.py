"""Builds folds: content that is collapsed to a line, and that the browser draws when the user opens it first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Final

import dash_mantine_components as dmc
from dash import html
from dash.development.base_component import Component

_numbers: Final = count()


def fold(title: str, children: Sequence[Component | None], is_open: bool = False) -> Component:
    """Return ``children``, a part of a card, in a fold. They cost the browser nothing until the user opens the fold."""
    return _details(title, children, is_open, className="card-table")


def fold_of_cards(title: str, children: Sequence[Component], is_open: bool = False) -> Component:
    """Return a fold that contains cards that users seldom look at."""
    return _details(title, [html.Div(children, className="fold-body")], is_open, className="fold")


def _details(title: str, children: Sequence[Component | None], is_open: bool, **looks: str) -> Component:
    # The browser finds the content of a fold by its number: callbacks.js listens to each fold that opens.
    number = next(_numbers)
    body = dmc.Collapse(
        list(children), id=fold_id(number), opened=is_open, keepMounted=False, transitionDuration=0
    )
    attributes: dict[str, Any] = {"data-fold": str(number), **looks}
    return html.Details([html.Summary(title), body], open=is_open, **attributes)


def fold_id(number: int) -> dict[str, Any]:
    """Return the id of the content of a fold."""
    return {"type": "fold", "number": number}
