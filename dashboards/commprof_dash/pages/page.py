"""What a page is."""

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
    """What a page shows: its controls, and what stands below them.

    ``follows`` while it may change by itself; ``run`` is the name of the run that it is about, "" for none or several.
    ``kept``: key and value that the address lacks and that hold while the page is drawn again, such as a choice of runs.
    """

    controls: Sequence[Component]
    body: Sequence[Component]
    follows: bool = False
    run: str = ""
    kept: tuple[str, str] | None = None


class Page(NamedTuple):
    """One page: its address, its title, its place in the navigation, and how it is drawn.

    ``render(runs, query, scheme)`` is called whenever the address or the scheme changes. It holds no state: what the page
    shows is in the query, and its controls (``ids.control``) write there. ``register(app, runs)``, once at the start, adds
    the callbacks of what changes within the page: none of them may write to a component outside of it. ``has_grid``: it
    begins with a grid, whose code the browser should load at once. ``has_charts``: it begins with charts, as a rule.
    """

    path: str
    title: str
    question: str  # that the page answers; its subtitle
    order: int  # place in the navigation; in tens, so that a page fits between two others
    render: Callable[[Runs, Query, Scheme], Drawing]
    register: Callable[[dash.Dash, Runs], None] | None = None
    has_grid: bool = False
    has_charts: bool = True
