"""Builds the frame of every page: header, navigation, and the stores that browser and server share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import dash_mantine_components as dmc
from dash import dcc, html
from dash.development.base_component import Component

from commprof_dash import address, ids, theme
from commprof_dash.address import Query
from commprof_dash.components.cards import glossary_link

if TYPE_CHECKING:
    from commprof_dash.pages.page import Page

_FOLLOW_MS: Final = 3000


def layout(pages: Sequence[Page]) -> Component:
    """Return the layout before the first page is drawn."""
    return dmc.MantineProvider(
        [
            dcc.Location(id=ids.ADDRESS, refresh=False),
            dcc.Store(id=ids.SCHEME),
            dcc.Store(id=ids.ADDRESS_WRITTEN),
            dcc.Store(id=ids.ARRIVED),
            dcc.Store(id=ids.FOLLOW),
            dcc.Store(
                id=ids.PAGES, data={page.path: [page.title, page.question, page.has_charts] for page in pages}
            ),
            dcc.Interval(id=ids.TICK, interval=_FOLLOW_MS, disabled=True),
            html.A("Skip to the page", href=f"#{ids.PAGE}", className="skip-link"),
            dmc.AppShell(
                [
                    dmc.AppShellHeader(_header()),
                    dmc.AppShellNavbar(
                        html.Nav(navigation(pages, None, {}), id=ids.NAVIGATION, **{"aria-label": "Pages"}),
                        p="xs",
                    ),
                    dmc.AppShellMain(
                        html.Div(
                            [
                                html.Div(id=ids.HEADING, className="page-head"),
                                html.Div(id=ids.PROGRESS, className="progress", role="status"),
                                html.Div(id=ids.CONTROLS, className="controls"),
                                html.Div(id=ids.BODY, className="page-body"),
                            ],
                            id=ids.PAGE,
                            className="page",
                            tabIndex=-1,
                        )
                    ),
                ],
                id=ids.SHELL,
                header={"height": 56},
                navbar={"width": 200, "breakpoint": "sm", "collapsed": {"mobile": True}},
                padding=0,
                transitionDuration=0,
            ),
        ],
        theme=theme.MANTINE,
        defaultColorScheme="auto",
    )


def navigation(pages: Sequence[Page], current: Page | None, query: Query) -> list[Component]:
    """Return the links to the pages, with ``current`` marked.

    Each link keeps the run, step and filters of ``query``.
    """
    return [
        dmc.NavLink(
            label=page.title,
            id=ids.page_link(page.path),
            href=address.link(page.path, **query),
            active=page is current,
            variant="light",
            **({"aria-current": "page"} if page is current else {}),
        )
        for page in pages
    ]


def heading(title: str, question: str) -> list[Component]:
    """Return the heading of a page: its title and the question that it answers."""
    return [html.H1(title), html.P(question, className="question")]


def _header() -> Component:
    return html.Div(
        [
            dmc.Burger(
                id=ids.MENU_BUTTON,
                opened=False,
                hiddenFrom="sm",
                size="sm",
                **{"aria-label": "Show the pages"},
            ),
            dcc.Link(
                [html.Img(src="assets/icon.svg", alt="", width=24, height=24), html.Span("commprof")],
                href="/",
                className="brand",
            ),
            html.Div(className="spacer"),
            glossary_link("Glossary", className="glossary"),
            dmc.ColorSchemeToggle(
                id=ids.SCHEME_TOGGLE,
                lightIcon=html.Span("☀", className="scheme-icon"),
                darkIcon=html.Span("☾", className="scheme-icon"),
                variant="default",
                size="lg",
                **{"aria-label": "Switch between light and dark"},
            ),
        ],
        className="header",
    )
