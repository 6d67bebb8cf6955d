"""Builds placeholders that a callback replaces when their answer is ready."""

from __future__ import annotations

from typing import Any, Final

from dash import dcc, html
from dash.development.base_component import Component

_EVERY_MS: Final = 1000


def place(name: str) -> dict[str, str]:
    """Return the id of the placeholder ``name``, whose ``children`` a callback replaces."""
    return {"type": "pending", "part": name}


def clock(name: str) -> dict[str, str]:
    """Return the id of the interval that polls for the answer until it is ``disabled``."""
    return {"type": "pending-clock", "part": name}


def about(name: str) -> dict[str, str]:
    """Return the id of the store that contains the argument of the callback."""
    return {"type": "pending-about", "part": name}


def pending(name: str, shown: Component, subject: Any) -> Component:
    """Return a component that shows ``shown`` until a callback of the page has the answer.

    Args:
        subject: The argument of this callback, as JSON.
    """
    return html.Div(
        [
            html.Div(_place(name, shown), role="status"),
            _about(name, subject),
            dcc.Interval(id=clock(name), interval=_EVERY_MS),
        ]
    )


def at_once(name: str, shown: Component, subject: Any) -> Component:
    """Return the same component as :func:`pending`, but without polling.

    The browser calls the callback of the store as soon as the page is loaded.
    """
    return html.Div([_place(name, shown), _about(name, subject)])


def _place(name: str, shown: Component) -> Component:
    return html.Div(shown, id=place(name), className="pending")


def _about(name: str, subject: Any) -> Component:
    return dcc.Store(id=about(name), data=subject)
