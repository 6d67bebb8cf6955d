"""Ids of the components that callbacks and tests refer to."""

from __future__ import annotations

from typing import Final

ADDRESS: Final = "address"  # the dcc.Location, whose pathname and search are the state of the page
# A store: "light" or "dark", the scheme that the browser uses now, followed by " wide" on a wide screen.
SCHEME: Final = "scheme"
SCHEME_TOGGLE: Final = "scheme-toggle"
SHELL: Final = "shell"
MENU_BUTTON: Final = "menu-button"
NAVIGATION: Final = "navigation"
PAGE: Final = "page"
HEADING: Final = "heading"
CONTROLS: Final = "controls"
BODY: Final = "body"
TICK: Final = "tick"  # an interval, which is enabled while the data of the page may change
# A store: the ticks that request the page again; ticks during a drawing are left out.
FOLLOW: Final = "follow"
ADDRESS_WRITTEN: Final = "address-written"  # a store that only exists because a callback needs an output
ARRIVED: Final = "arrived"  # a store that only exists because a callback needs an output
PROGRESS: Final = "progress"  # the text that is shown until the page is drawn
PAGES: Final = "pages"  # a store: the title and question of each page, by the path of the page


def control(key: str) -> dict[str, str]:
    """Return the id of the control whose value is in the address under ``key``."""
    return {"type": "control", "key": key}


def page_link(path: str) -> dict[str, str]:
    """Return the id of the navigation link to the page at ``path``.

    The browser updates the query of the link's address.
    """
    return {"type": "page-link", "path": path}


def drawn(part: str) -> dict[str, str]:
    """Return the id of the store that describes the drawn page and the values of its controls.

    The store is part of the page's body. The id is a pattern, because callbacks can refer to components that do
    not exist before the first drawing only by a pattern.
    """
    return {"type": "drawn", "part": part}


def sorting(column: str) -> dict[str, str]:
    """Return the id of the heading that sorts a table by ``column``."""
    return {"type": "sorting", "column": column}


def graph(name: str) -> dict[str, str]:
    """Return the id of the graph in the figure card called ``name``."""
    return {"type": "graph", "name": name}


def card(name: str) -> str:
    """Return the DOM id of the figure or table card called ``name``. The ids of its parts start with this id."""
    return f"card-{name}"
