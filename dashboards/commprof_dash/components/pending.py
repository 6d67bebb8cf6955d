"""A part of a page that is filled in when its answer is there."""

from __future__ import annotations

from typing import Any, Final

from dash import dcc, html
from dash.development.base_component import Component

_EVERY_MS: Final = 1000


def place(name: str) -> dict[str, str]:
    """Id of where the part called ``name`` stands: its ``children`` are replaced."""
    return {"type": "pending", "part": name}


def clock(name: str) -> dict[str, str]:
    """Id of the interval that asks for it, until it is ``disabled``."""
    return {"type": "pending-clock", "part": name}


def about(name: str) -> dict[str, str]:
    """Id of the store that holds what it is about."""
    return {"type": "pending-about", "part": name}


def pending(name: str, shown: Component, subject: Any) -> Component:
    """``shown`` until a callback of the page has something better.

    Args:
        subject: what that callback needs to know, as JSON.
    """
    return html.Div(
        [
            html.Div(_place(name, shown), role="status"),
            _about(name, subject),
            dcc.Interval(id=clock(name), interval=_EVERY_MS),
        ]
    )


def at_once(name: str, shown: Component, subject: Any) -> Component:
    """The same without a clock: for a callback of the store, which the browser calls as soon as the page is there."""
    return html.Div([_place(name, shown), _about(name, subject)])


def _place(name: str, shown: Component) -> Component:
    return html.Div(shown, id=place(name), className="pending")


def _about(name: str, subject: Any) -> Component:
    return dcc.Store(id=about(name), data=subject)
