"""Ids of the components that callbacks and tests refer to."""

from __future__ import annotations

from typing import Final

ADDRESS: Final = "address"  # the dcc.Location: pathname and search are the state of the page
SCHEME: Final = "scheme"  # a store: "light" or "dark", as the browser draws the page now
SCHEME_TOGGLE: Final = "scheme-toggle"
SHELL: Final = "shell"
MENU_BUTTON: Final = "menu-button"
NAVIGATION: Final = "navigation"
PAGE: Final = "page"
HEADING: Final = "heading"
CONTROLS: Final = "controls"
BODY: Final = "body"
TICK: Final = "tick"  # an interval: asks for the page again while what it shows may change by itself
ADDRESS_WRITTEN: Final = "address-written"  # a store that only exists because a callback needs an output


def control(key: str) -> dict[str, str]:
    """Id of the control whose value stands in the address under ``key``."""
    return {"type": "control", "key": key}


def drawn(part: str) -> dict[str, str]:
    """Id of the store, part of the page's body, that says which page was drawn and what its controls held.

    It is of a pattern, since callbacks may name what is not there before the first drawing only in that way.
    """
    return {"type": "drawn", "part": part}


def sorting(column: str) -> dict[str, str]:
    """Id of the heading that sorts a table by ``column``."""
    return {"type": "sorting", "column": column}


def graph(name: str) -> dict[str, str]:
    """Id of the graph in the figure card called ``name``."""
    return {"type": "graph", "name": name}


def card(name: str) -> str:
    """DOM id of the figure or table card called ``name``; its parts carry it as a prefix."""
    return f"card-{name}"
