"""Defines the type of a page and of its drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dash.development.base_component import Component

from commprof_dash.address import Query
from commprof_dash.data import Runs
from commprof_dash.theme import Scheme

if TYPE_CHECKING:
    import dash


class Drawing(NamedTuple):
    """The content of a page: its controls, and the body below them.

    Attributes:
        follows: Whether the page is drawn again as its data changes.
        run: The name of the run of the page; "" for none or several.
        kept: A key and value that the address lacks and that stay fixed while the page is drawn again, such as a
            choice of runs.
    """

    controls: Sequence[Component]
    body: Sequence[Component]
    follows: bool = False
    run: str = ""
    kept: tuple[str, str] | None = None


class Page(NamedTuple):
    """One page: its address, its title, its place in the navigation, and the functions that draw it.

    A page has no state: its content depends on the query, and its controls (``ids.control``) write to the query.

    Attributes:
        render: ``render(runs, query, scheme)`` is called whenever the address or the scheme changes.
        register: ``register(app, runs)`` is called once at the start, and adds the callbacks of content that
            changes within the page. These callbacks must not write to a component outside of the page.
        has_grid: Whether the page begins with a grid, whose code the browser should load at once.
        has_charts: Whether the page usually begins with charts.
    """

    path: str
    title: str
    question: str  # the question that the page answers, which is its subtitle
    order: int  # the place in the navigation, in tens, so that a page fits between two others
    render: Callable[[Runs, Query, Scheme], Drawing]
    register: Callable[[dash.Dash, Runs], None] | None = None
    has_grid: bool = False
    has_charts: bool = True
