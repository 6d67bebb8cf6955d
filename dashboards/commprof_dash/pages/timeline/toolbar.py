"""Builds the toolbar of the timeline: buttons that move it, and fields that name a step, ranks or a record."""

from __future__ import annotations

from typing import Final

import dash_mantine_components as dmc
from dash import dcc, html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash.pages.timeline.data import View

STEP: Final = "timeline-step"
RANKS: Final = "timeline-ranks"
RECORD: Final = "timeline-record"
BUTTON: Final = "timeline-button"
ROWS: Final = "timeline-rows"
BY: Final = "timeline-by"
_BUTTONS: Final = {
    "in": "Zoom in",
    "out": "Zoom out",
    "left": "Earlier",
    "right": "Later",
    "all": "Whole run",
}
_KEYS: Final = {"in": "W", "out": "S", "left": "A", "right": "D"}
_SIGNS: Final = {"in": "+", "out": "\u2212", "left": "\u2190", "right": "\u2192", "all": "Whole run"}


def toolbar(view: View, shown: api.Timeline, hosts: int, folded: bool, by_lateness: bool) -> Component:
    """Return the buttons and fields for the timeline that shows ``view``.

    With several ranks, the toolbar also selects whether rows are ranks or hosts, and their order.
    """
    buttons = [
        html.Button(
            _SIGNS[what],
            id={"type": BUTTON, "what": what},
            className="tool",
            title=f"{title} (key {_KEYS[what]})" if what in _KEYS else title,
            type="button",
            **{"aria-label": title},
        )
        for what, title in _BUTTONS.items()
    ]
    # Fields have debounce, so that the page is drawn again when a value is complete, and not at each key.
    return html.Div(
        [
            *buttons,
            html.Label(
                [
                    "Step ",
                    dcc.Input(
                        id=STEP,
                        type="number",
                        min=0,
                        step=1,
                        value=view.step,
                        debounce=True,
                        className="tool-input",
                    ),
                ]
            ),
            html.Label(
                [
                    "Ranks ",
                    dcc.Input(
                        id=RANKS,
                        type="text",
                        debounce=True,
                        value=view.ranks,
                        placeholder=_ranks_text(shown.run_ranks),
                        className="tool-input",
                    ),
                ]
            ),
            *(_orders(hosts, folded, by_lateness) if len(shown.run_ranks) > 1 else []),
            html.Label(
                [
                    "Record ",
                    dcc.Input(
                        id=RECORD,
                        type="text",
                        debounce=True,
                        value=view.stored()["record"],
                        placeholder="its key",
                        className="tool-input",
                    ),
                ]
            ),
        ],
        className="toolbar",
        role="group",
        **{"aria-label": "Move the timeline"},
    )


def _orders(hosts: int, folded: bool, by_lateness: bool) -> list[Component]:
    rows = {"ranks": "Ranks", "hosts": "Hosts"}
    orders = {"rank": "By rank", "lateness": "Latest first"}
    return [
        dmc.SegmentedControl(
            id=identity,
            data=[{"value": key, "label": text} for key, text in choices.items()],
            value=value,
            size="xs",
            **{"aria-label": label},
        )
        for label, identity, choices, value in (
            *((("Rows", ROWS, rows, "hosts" if folded else "ranks"),) if hosts > 1 else ()),
            ("Order of the rows", BY, orders, "lateness" if by_lateness else "rank"),
        )
    ]


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else ", ".join(map(str, ranks))
