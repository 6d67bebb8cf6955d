"""Ids of the components that callbacks and tests refer to."""

from __future__ import annotations

from typing import Final

ADDRESS: Final = "address"  # the dcc.Location: pathname and search are the state of the page
# A store: "light" or "dark", as the browser draws the page now, and " wide" on a wide screen.
SCHEME: Final = "scheme"
SCHEME_TOGGLE: Final = "scheme-toggle"
SHELL: Final = "shell"
MENU_BUTTON: Final = "menu-button"
NAVIGATION: Final = "navigation"
PAGE: Final = "page"
HEADING: Final = "heading"
CONTROLS: Final = "controls"
BODY: Final = "body"
TICK: Final = "tick"  # an interval, enabled while what the page shows may change by itself
FOLLOW: Final = "follow"  # a store: the ticks that ask for the page again; those during a drawing do not
ADDRESS_WRITTEN: Final = "address-written"  # a store that only exists because a callback needs an output
ARRIVED: Final = "arrived"  # the same
PROGRESS: Final = "progress"  # says what is being read until the page is drawn
PAGES: Final = "pages"  # a store: title and question of each page, by its path


def control(key: str) -> dict[str, str]:
    """Id of the control whose value stands in the address under ``key``."""
    return {"type": "control", "key": key}


def page_link(path: str) -> dict[str, str]:
    """Id of the link of the navigation to the page at ``path``; the browser keeps the query of its address current."""
    return {"type": "page-link", "path": path}


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
